"""A Llama of transformers on ranks: python transformers_program.py RESULTS.json FOLDER plain|asynctp

`tp_plan="auto"` shards it. A step of training is compiled, then `generate` with a static cache, which transformers
compiles on GPUs by itself, and on a CPU where it is told to. With `asynctp` there is one line more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig

import asynctp_passes


def main(out: Path, folder: Path, how: str) -> None:
    """Write the loss, a gradient's norm, the tokens and the picture of what was compiled."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        config = LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    torch._inductor.config.fallback_by_default = True  # no C++ is compiled
    if how == "asynctp":
        asynctp_passes.enable(asynctp_passes.Config(strict="all"))
    ids = torch.arange(32).reshape(2, 16)
    loss = torch.compile(model)(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradient = model.model.layers[0].mlp.down_proj.weight.grad
    gradient = getattr(gradient, "full_tensor", lambda: gradient)()
    trained = asynctp_passes.summary()

    asynctp_passes.clear_reports()
    torch._dynamo.reset()
    model.eval()
    compiling = CompileConfig(mode="default", fullgraph=False)
    compiling._compile_all_devices = True
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=8, do_sample=False,
        cache_implementation="static", compile_config=compiling,
    )  # fmt: skip
    served = asynctp_passes.summary()
    if dist.get_rank() == 0:
        pictures = {
            name: {"fused": one.fused, "missed": one.missed, "graphs": one.graphs, "text": str(one)}
            for name, one in (("trained", trained), ("served", served))
        }
        values = {"loss": float(loss), "gradient": float(gradient.norm()), "tokens": tokens.tolist()}
        out.write_text(json.dumps({**values, **pictures}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
