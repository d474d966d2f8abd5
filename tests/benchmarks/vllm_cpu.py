"""vLLM's CPU build on the prompts of `cpu_speed`; run by it with a Python that has vLLM, so it
imports nothing of this package.

python tests/benchmarks/vllm_cpu.py < SETTINGS.json"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def sampler(given: dict[str, Any]) -> Any:
    """vLLM in this process, so that its CPU seconds are this one's."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(given["threads"]),
    }
    from vllm import LLM

    return LLM(
        given["model"], dtype=given["dtype"], max_model_len=1024, max_num_seqs=max(given["rows"]),
        enforce_eager=True, enable_prefix_caching=True,
    )  # fmt: skip


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(given: dict[str, Any]) -> dict[str, float]:
    """The figures of `cpu_speed.decode`, with `vllm_` before their names."""
    from vllm import SamplingParams

    made, asked, figures = sampler(given), given["prompts"], {}
    sampling = SamplingParams(max_tokens=given["answer"], ignore_eos=True, logprobs=0)
    for rows in given["rows"]:
        requests = [{"prompt_token_ids": asked[i % len(asked)]} for i in range(rows)]
        for name in ("decode", "cached_decode"):
            found = []
            for _ in range(given["tries"] + 1):  # the first one is for warming up
                if name == "decode":
                    made.reset_prefix_cache()
                before = cpu_seconds()
                made.generate(requests, sampling, use_tqdm=False)
                found.append(cpu_seconds() - before)
            figures[f"vllm_{name}_{rows}"] = rows * given["answer"] / min(found[1:])
    return figures


if __name__ == "__main__":
    output = os.dup(1)
    os.dup2(2, 1)  # vLLM writes to it, too
    found = json.dumps(measure(json.load(sys.stdin)))
    os.write(output, found.encode())
