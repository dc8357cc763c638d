"""vLLM's ``LLM`` class with tierkv: the second time, a prompt is loaded and not computed.

python examples/offline.py MODEL ROOT_DIR
"""

import sys
import time
from typing import Any


def kv_transfer_config(root_dir: str) -> dict[str, Any]:
    """One GiB of host memory, and behind it a directory that other engines may share."""
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": [{"type": "fs", "root_dir": root_dir}],
        },
    }


def main(model: str, root_dir: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=True,
        kv_transfer_config=kv_transfer_config(root_dir),
    )
    prompt = "The tide comes in and the tide goes out. " * 100
    for attempt in ("computed", "loaded"):
        begin = time.perf_counter()
        (result,) = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        seconds = time.perf_counter() - begin
        print(f"{attempt}: {seconds:.2f} s, {result.num_cached_tokens} of {len(result.prompt_token_ids)} tokens cached")
        llm.reset_prefix_cache()  # on the device only: host memory and the directory keep theirs


if __name__ == "__main__":
    main(*sys.argv[1:])
