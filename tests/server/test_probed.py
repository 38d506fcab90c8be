"""The doctor's probe on our own server, over real sockets and in real time: it understands everything, and finds the slots."""

import asyncio

from flatout.client.completions import COMPLETIONS
from flatout.client.http import Endpoint
from flatout.doctor.probe import Probe, probe
from flatout.doctor.probe_rules import judge


def probed(port: int) -> Probe:
    async def work() -> Probe:
        endpoint = Endpoint(f"http://127.0.0.1:{port}/v1")
        try:
            return await probe(endpoint, seconds=15.0, most_streams=8)
        finally:
            endpoint.close()

    return asyncio.run(work())


def test_two_slots_are_found(slow):
    found = probed(slow.port)
    assert found.server.kind == "flatout" and found.server.models == ("script",) and found.server.max_model_len == 2048
    dialect = found.dialect
    assert (dialect.route, dialect.ignore_eos, dialect.usage) == (COMPLETIONS, True, True)
    assert dialect.tokens_per_word > 3, "a token of this model is a byte"
    assert max(p.active for p in found.points) == 2 and found.points[-1].streams >= 4
    assert found.repeat and found.repeat.cached and found.repeat.cached > 0.5 * found.repeat.tokens
    assert judge(found)[0].constraint == "slots"
    slow.wait_idle()
