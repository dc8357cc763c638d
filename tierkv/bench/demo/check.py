"""Whether outputs with offload are those without.

One prompt at a time, an engine repeats itself bit for bit, as long as it finds the same number of tokens in a cache:
computing 128 tokens behind 896 cached ones rounds differently from computing 1,024 at once, on some processors. So each
probe is compared with a run without offload in which the engine itself had as many tokens cached.

Many prompts at a time, what is computed together depends on what was cached, and rounding with it: with bf16 on a
processor with matrix units, computing 512 tokens a step instead of 1,024 moves log probabilities by tenths. Two runs
without offload say how much: one recomputes everything in the usual steps, the other has everything on the device and
computes in steps of one conversation's new tokens. The tolerance is twice the largest difference between those two,
since the largest of a sample is not the largest there is. Tokens must be equal, except where the run without offload
was itself undecided: its two best tokens within the tolerance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from tierkv.bench.demo.scenario import AMPLE, HOST_FS, NONE, OFFLOADED, EngineResult, Output


class Comparison(msgspec.Struct, kw_only=True):
    """Outputs of one kind of run against those without offload.

    draws: other tokens, where the reference was undecided. wrong: other tokens where it was not, or a
    log probability outside of the tolerance.
    """

    what: str
    compared: int = 0
    identical: int = 0
    draws: int = 0
    wrong: int = 0
    largest_difference: float = 0.0


class Check(msgspec.Struct, kw_only=True):
    """The verdict.

    tolerance: in log probability. loaded_probes: how many probes the host or a tier served.
    """

    tolerance: float
    batched: list[Comparison]
    single: list[Comparison]
    loaded_probes: int
    failures: list[str]

    @property
    def passed(self) -> bool:
        return not self.failures


def check(results: Iterable[EngineResult]) -> Check:
    """Compare every output of the runs with offload."""
    by_run = {(r.pool, r.mode): r for r in results}
    pools = sorted({pool for pool, _ in by_run})
    offloaded = [mode for mode in OFFLOADED if any(mode == m for _, m in by_run)]
    baseline = _compare(_batched_pairs(by_run, pools, AMPLE), AMPLE, float("inf"))
    tolerance = 2 * baseline.largest_difference
    batched = [_compare(_batched_pairs(by_run, pools, mode), mode, tolerance) for mode in offloaded]
    single = [_compare(_single_pairs(by_run, pools, mode), mode, 0.0) for mode in offloaded]
    loaded = sum(o.cached_tokens > 0 for (_, mode), r in by_run.items() if mode in OFFLOADED for o in r.probes.again)
    failures = [
        f"{c.what}: {c.wrong} of {c.compared} outputs differ by more than the tolerance" for c in batched if c.wrong
    ]
    for c in single:
        if c.identical < c.compared:
            failures.append(
                f"{c.what}, one at a time: {c.compared - c.identical} of {c.compared} outputs are not identical"
            )
        if not c.compared:
            failures.append(f"{c.what}, one at a time: nothing to compare with")
    if not any(o.cached_tokens for (_, mode), r in by_run.items() if mode == HOST_FS for o in r.probes.again):
        failures.append(f"{HOST_FS}, one at a time: no output used the cache, so the check shows nothing")
    return Check(
        tolerance=tolerance, batched=[baseline, *batched], single=single, loaded_probes=loaded, failures=failures
    )


Runs = dict[tuple[int, str], EngineResult]
Pair = tuple[Output, Output]


def _batched_pairs(runs: Runs, pools: Iterable[int], mode: str) -> Iterator[Pair]:
    """(without offload, with ``mode``) for each prompt of each round."""
    for pool in pools:
        for expected, found in zip(runs[pool, NONE].rounds, runs[pool, mode].rounds, strict=True):
            yield from zip(expected.outputs, found.outputs, strict=True)


def _single_pairs(runs: Runs, pools: Iterable[int], mode: str) -> Iterator[Pair]:
    """(without offload, with ``mode``) for each probe that found as many tokens cached."""
    for pool in pools:
        reference, probes = runs[pool, NONE].probes, runs[pool, mode].probes
        for i, again in enumerate(probes.again):
            yield reference.computed[i], probes.computed[i]
            for candidate in (reference.computed[i], reference.reference[i]):
                if candidate.cached_tokens == again.cached_tokens:
                    yield candidate, again


def _compare(pairs: Iterable[Pair], what: str, tolerance: float) -> Comparison:
    result = Comparison(what=what)
    for expected, found in pairs:
        result.compared += 1
        if (expected.token, expected.logprobs) == (found.token, found.logprobs):
            result.identical += 1
            continue
        difference = abs(expected.logprobs[expected.token] - found.logprobs.get(expected.token, float("-inf")))
        result.largest_difference = max(result.largest_difference, difference)
        if difference > tolerance:
            result.wrong += 1
        elif expected.token != found.token:
            if _undecided(expected, found.token, tolerance):
                result.draws += 1
            else:
                result.wrong += 1
    return result


def _undecided(expected: Output, other: int, tolerance: float) -> bool:
    second = expected.logprobs.get(other, float("-inf"))
    return expected.logprobs[expected.token] - second <= tolerance
