#!/usr/bin/env python3
"""Write a random checkpoint of Kimi K3's real width, in the release's format.

Layer 0 is dense, then come as many MoE layers of 896 experts as asked for, one shard each. A MoE
layer takes 17 GB. For measuring conversion and expert reads where the release does not fit.

    python scripts/make_wide_checkpoint.py /tmp/wide --moe-layers 1
"""

import argparse
from pathlib import Path
from typing import Any

from mlx_k3.checkpoint.synthetic import write_random_release

_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 32, "type": "float", "strategy": "group"},
        }
    },
}


def wide_config(moe_layers: int, vocabulary: int) -> dict[str, Any]:
    """K3's configuration with fewer layers: every fourth is MLA, and so is the last one."""
    layers = 1 + moe_layers
    mla = sorted({*range(4, layers + 1, 4), layers})
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "vision_config": None,
        "text_config": {
            "model_type": "kimi_linear",
            "vocab_size": vocabulary,
            "hidden_size": 7168,
            "intermediate_size": 33792,
            "num_hidden_layers": layers,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 12,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "tie_word_embeddings": False,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "linear_attn_config": {
                "kda_layers": [i for i in range(1, layers + 1) if i not in mla],
                "full_attn_layers": mla,
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
            },
            "quantization_config": _QUANTIZATION,
        },
    }


def main() -> None:
    """Parse, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--moe-layers", type=int, default=1, metavar="N")
    parser.add_argument("--vocabulary", type=int, default=163840, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_random_release(args.out, wide_config(args.moe_layers, args.vocabulary), args.seed)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: {size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
