// What stands between a block and its products, row by row: norms, sums, gates and the router's choice. What is refused, and how rows are shared
// among threads; no arithmetic, which is rows.inc's.

#include "kernels.h"
#include "pool.h"

namespace flatout {
namespace {

constexpr int64_t kPartElements = 4096;  // about a microsecond

// of(operands, row) for all rows, each of so many elements.
template <class Operands>
int each(void (*of)(const Operands&, int64_t), const Operands& operands, int64_t width) {
  Turn turn;
  share_ranges(operands.rows, operands.rows * width, kPartElements, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) of(operands, r);
  });
  return 0;
}

template <class Operands>
bool has_rows(const Operands& o) {
  return is_type(o.type) && o.width > 0 && (o.rows == 0 || (o.rows > 0 && o.x && o.out));
}

}  // namespace
}  // namespace flatout

FLATOUT_API int flatout_norm(const FlatoutNorm* norm) {
  using namespace flatout;
  if (!norm || !has_rows(*norm) || !norm->weight || norm->width % 16) return 1;
  return each(kernels().norm, *norm, norm->width);
}

FLATOUT_API int flatout_add(const FlatoutAdd* add) {
  using namespace flatout;
  if (!add || !has_rows(*add)) return 1;
  return each(kernels().add, *add, add->width);
}

FLATOUT_API int flatout_gate(const FlatoutGate* gate) {
  using namespace flatout;
  if (!gate || !has_rows(*gate) || gate->gate <= FLATOUT_NO_GATE || gate->gate > FLATOUT_GELU) return 1;
  return each(kernels().gate, *gate, gate->width);
}

FLATOUT_API int flatout_route(const FlatoutRoute* route) {
  using namespace flatout;
  if (!route || !is_type(route->type) || route->rows < 0 || route->top_k <= 0 || route->top_k > route->experts || route->experts > kMostExperts) return 1;
  if (route->rows && (!route->logits || !route->weights || !route->chosen)) return 1;
  return each(kernels().route, *route, route->experts);
}
