"""vLLM's engine on two CPU ranks: python vllm_engine_program.py MODEL OUT.json [COMPILATION_CONFIG.json]

It generates from a model, greedily; without a configuration, in vLLM's eager mode. OUT.json gets tokens and their
logarithmic probabilities.

`on` is a general plug-in of vLLM's, which every worker loads. vLLM's CPU platform calls collectives that write in
place, and matmuls of its own. The plug-in has it call both as its CUDA platform does: by ops that write to no input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROMPTS = ([*range(3, 40)], [5, 9, 11])


def on() -> None:
    """Collectives and matmuls of vLLM's CPU platform, as those of its CUDA platform."""
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding
    from vllm.platforms import current_platform

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    in_place = CpuCommunicator.all_reduce
    CpuCommunicator.all_reduce = lambda self, tensor: in_place(self, tensor.clone())
    type(current_platform).use_custom_op_collectives = classmethod(lambda cls: True)
    for module in (utils, linear, vocab_parallel_embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = plain


def main() -> None:
    from vllm import LLM, SamplingParams

    model, out, *given = sys.argv[1:]
    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 26,
        enforce_eager=not given,
        compilation_config=json.loads(Path(given[0]).read_text()) if given else {},
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, logprobs=1, ignore_eos=True)
    answers = [request.outputs[0] for request in engine.generate(prompts, sampling)]
    found = {
        "tokens": [list(answer.token_ids) for answer in answers],
        "logprobs": [
            [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            for answer in answers
        ],
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
