"""What the demo runs: the conversations, the modes, and the messages between its processes."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

#: Of SmolLM2-135M: 30 layers × 3 KV heads × 64 × (K and V) × 2 bytes.
KV_BYTES_PER_TOKEN = 23_040
_FIRST_WORD, _WORDS = 100, 49_000  # token ids of ordinary text: behind the special tokens, within the vocabulary

#: Without offload, twice: with the device memory of the scenario, and with enough for everything. The second is about
#: what the best of caches could reach, and it computes in other steps, so that the two say how far outputs may differ.
NONE, AMPLE, HOST, HOST_FS = "no offload", "all on device", "host", "host + fs"
MODES = (NONE, AMPLE, HOST, HOST_FS)
OFFLOADED = (HOST, HOST_FS)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are in tokens. A round sends every conversation once, all together, and only prefills it.

    pools: numbers of conversations, each run for itself in all ``modes``.
    modes: which of ``MODES``; the check can do without ``HOST`` only.
    probes: conversations that are sent one at a time, for a comparison bit for bit.
    max_num_seqs: four are what the device holds of the longest prompts; more would only preempt each other.
    block_size: the engine's default on the CPU. All prompts are multiples of it.
    """

    pools: tuple[int, ...] = (4, 12, 32)
    modes: tuple[str, ...] = MODES
    rounds: int = 4
    first_prompt: int = 1024
    growth: int = 256
    device_tokens: int = 8_192
    host_tokens: int = 24_576
    probes: int = 2
    block_size: int = 128
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 2_048

    def prompt_tokens(self, round_: int) -> int:
        """Tokens of a prompt in round 1, 2, …"""
        return self.first_prompt + self.growth * (round_ - 1)


FULL = Scenario()
#: One pool that fits neither the device nor the host, on half the memory and less; the host alone is left out.
QUICK = Scenario(
    pools=(5,),
    modes=(NONE, AMPLE, HOST_FS),
    rounds=2,
    device_tokens=4_096,
    host_tokens=6_144,
    probes=1,
    max_num_seqs=2,
)


def conversation(name: str, tokens: int) -> list[int]:
    """The first token ids of a conversation: a passage of its own, said again and again.

    A repeated passage gives the model something to be sure of, so that its next token is rarely a draw between two;
    127 is prime, so that no two blocks of a conversation are alike.
    """
    passage = np.frombuffer(hashlib.shake_128(name.encode()).digest(4 * 127), dtype="<u4") % _WORDS + _FIRST_WORD
    ids: list[int] = np.resize(passage, tokens).tolist()
    return ids


class EngineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One child process: one engine, one pool, one mode."""

    scenario: Scenario
    model: str
    pool: int
    mode: str
    root_dir: str | None = None

    @property
    def offloaded(self) -> bool:
        return self.mode in OFFLOADED

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of a step. ``AMPLE`` takes the smallest steps that offload leads to: one conversation's new tokens.

        How a sum is rounded depends on how many tokens are computed together, most of all on processors with matrix
        units. What differs between these steps and the usual ones is what may differ with offload.
        """
        return self.scenario.growth if self.mode == AMPLE else self.scenario.max_num_batched_tokens

    @property
    def device_tokens(self) -> int:
        if self.mode != AMPLE:
            return self.scenario.device_tokens
        longest = self.scenario.prompt_tokens(self.scenario.rounds)
        return (self.pool + self.scenario.probes + 1) * longest

    def connector(self) -> dict[str, Any] | None:
        """``kv_transfer_config`` of this run."""
        if not self.offloaded:
            return None
        tiers = [{"type": "fs", "root_dir": self.root_dir}] if self.root_dir else []
        return transfer_config(self.scenario.host_tokens, tiers)


def transfer_config(host_tokens: int, tiers: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    """``kv_transfer_config`` with host memory for so many tokens; ``extra``: more of ``kv_connector_extra_config``."""
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": host_tokens * KV_BYTES_PER_TOKEN,
            "secondary_tiers": tiers,
            **extra,
        },
    }


class Output(msgspec.Struct, frozen=True):
    """The next token of one prompt: ``logprobs`` of the most probable tokens, by token id."""

    token: int
    logprobs: dict[int, float]
    cached_tokens: int = 0


class Counts(msgspec.Struct, frozen=True):
    """Tokens, from the engine's own metrics: asked for in prompts, found on the device, found by the connector."""

    prompt: int
    device: int
    external: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The engine is up."""

    seconds: float
    engine_version: str


class Progressed(msgspec.Struct, frozen=True, tag="progressed"):
    """One more prompt is done."""


class RoundDone(msgspec.Struct, frozen=True, tag="round"):
    """All conversations had their turn. ``outputs`` are in the order of the conversations."""

    round: int
    seconds: float
    counts: Counts
    outputs: list[Output]


class ProbesDone(msgspec.Struct, frozen=True, tag="probes"):
    """The probes, sent one at a time: computed, and sent again when their blocks were gone from the device.

    reference: without offload only: sent once more, so that the device has them.
    """

    computed: list[Output]
    again: list[Output]
    reference: list[Output] = []


Message = Started | Progressed | RoundDone | ProbesDone


class EngineResult(msgspec.Struct, kw_only=True):
    """What one child reported."""

    pool: int
    mode: str
    started: Started
    rounds: list[RoundDone]
    probes: ProbesDone
