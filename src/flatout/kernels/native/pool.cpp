// The thread pool: workers that spin briefly, then yield, then sleep, and take parts of the work at hand one by one. No arithmetic here.
//
// The work at hand is a stretch of parts for each thread, which it goes through from end to end before it takes from others: so it finds what it
// asked for ahead. A stretch is one word: the work's number and how many parts nobody has taken yet. Taking a part is one compare-and-swap, and who
// succeeds may read the rest, as the caller waits for every part taken. So a worker late to one job can never touch the next, and nobody is waited
// for but those at work. Beside one busy foreign process, 2 threads on 2 cores: 83 us where 1 thread takes 72 and a quiet machine 41
// (3072x576, one row); barriers that wait for all fell to a quarter and less.

#include "pool.h"

#include "native.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace flatout {
namespace {

constexpr int kMostThreads = 256;
constexpr int kSpins = 2000;           // some 50 to 100 us of pauses: longer than Python takes from one product to the next
constexpr int64_t kYieldFor = 2000000; // ns after which a worker sleeps: a step's sampling and scheduling are shorter

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1000000000} + t.tv_nsec;
}

// What a thread has of the work at hand, in one line of the cache: it takes 0.17 us to come from another core.
struct alignas(64) Stretch {
  std::atomic<uint64_t> work{0};  // number << 32 | parts that nobody has taken yet; the rest is written before it
  Part run = nullptr;
  const void* context = nullptr;
  int end = 0;  // one past the last part
};

struct Pool {
  pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
  uint64_t number = 0;

  alignas(64) std::atomic<int> done{0};
  Stretch stretch[kMostThreads];

  alignas(64) std::atomic<int> sleeping{0};
  std::atomic<bool> stop{false};
  pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

  std::atomic<int> workers{0}, begun{0};
  bool started = false;
  pthread_t worker[kMostThreads];
};

std::atomic<int> wanted{1};
Pool* pool = new Pool;  // never freed: workers outlive main()

thread_local int mine = 0;  // which stretch; a caller's is the first

bool idle(const Pool& p) { return static_cast<uint32_t>(p.stretch[mine].work.load()) == 0 && !p.stop.load(); }

// Does one part, if any is left.
bool take(Pool& p) {
  const int threads = p.workers + 1;
  for (int i = 0; i < threads; i++) {
    const int from = mine + i < threads ? mine + i : mine + i - threads;
    Stretch& s = p.stretch[from];
    uint64_t word = s.work.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(word) != 0) {
      if (s.work.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        s.run(s.context, s.end - static_cast<int>(static_cast<uint32_t>(word)));
        p.done.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }
  return false;
}

void rest(Pool& p) {
  for (int i = 0; i < kSpins; i++) {
    if (!idle(p)) return;
    pause();
  }
  for (const int64_t end = now() + kYieldFor; now() < end;) {
    if (!idle(p)) return;
    sched_yield();
  }
  pthread_mutex_lock(&p.bed);
  p.sleeping++;  // before it looks again, as share() sets the work before it looks for sleepers
  while (idle(p)) pthread_cond_wait(&p.wake, &p.bed);
  p.sleeping--;
  pthread_mutex_unlock(&p.bed);
}

void wake(Pool& p) {
  if (p.sleeping.load() == 0) return;
  pthread_mutex_lock(&p.bed);
  pthread_cond_broadcast(&p.wake);
  pthread_mutex_unlock(&p.bed);
}

void* work(void* argument) {
  Pool& p = *static_cast<Pool*>(argument);
  mine = ++p.begun;
  while (!p.stop.load(std::memory_order_relaxed)) {
    if (!take(p)) rest(p);
  }
  return nullptr;
}

// Workers take no signals: Python's are for its own threads. Fewer of them than asked is slower, nothing worse.
void start(Pool& p) {
  p.started = true;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (p.workers < wanted - 1 && pthread_create(&p.worker[p.workers], nullptr, work, &p) == 0) p.workers++;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void finish(Pool& p) {
  p.stop = true;
  wake(p);
  while (p.workers > 0) pthread_join(p.worker[--p.workers], nullptr);
  p.begun = 0;
  p.stop = false;
}

// A child has the memory but no workers, and perhaps locks held by threads it has not: it leaves the old pool alone and makes its own.
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

}  // namespace

int threads() { return wanted.load(std::memory_order_relaxed); }

Turn::Turn() { pthread_mutex_lock(&pool->turn); }
Turn::~Turn() { pthread_mutex_unlock(&pool->turn); }

void share(int parts, Part run, const void* context) {
  Pool& p = *pool;
  if (!p.started) start(p);
  if (parts == 1 || p.workers == 0) {
    for (int i = 0; i < parts; i++) run(context, i);
    return;
  }
  p.done.store(0, std::memory_order_relaxed);
  p.number++;
  const int threads = p.workers + 1;
  for (int i = threads - 1, end = parts; i >= 0; i--) {
    const int begin = static_cast<int>(int64_t{parts} * i / threads);
    Stretch& s = p.stretch[i];
    s.run = run;
    s.context = context;
    s.end = end;
    s.work.store(p.number << 32 | static_cast<uint32_t>(end - begin));
    end = begin;
  }
  wake(p);
  while (take(p)) {
  }
  for (int i = 0; p.done.load(std::memory_order_acquire) != parts; i++) {
    if (i < kSpins) pause();
    else sched_yield();
  }
}

}  // namespace flatout

FLATOUT_API int flatout_threads(int n) {
  using namespace flatout;
  Turn turn;
  n = n < 1 ? 1 : n > kMostThreads ? kMostThreads : n;
  if (n != wanted) {
    finish(*pool);
    wanted = n;
    start(*pool);
    wanted = pool->workers + 1;
  }
  return wanted;
}
