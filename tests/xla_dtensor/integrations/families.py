"""Tiny models of many families of Transformers, and what each trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["FAMILIES", "NUM_ROWS", "Family", "family_collator", "family_model", "family_rows"]

NUM_ROWS = 40
_VOCABULARY, _LENGTH, _IMAGE, _SEEN = 64, 12, 9, 4

_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {**_SIZES, **_QUIET, "type_vocab_size": 2, "num_labels": 4}
_SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_VIT = {**_SIGHT, **_QUIET, "num_labels": 4}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
}
_LLAMA = {"model_type": "llama", **_GROUPED}
_CLIP_SIGHT = {"model_type": "clip_vision_model", **_SIGHT}
_SIGLIP_SIGHT = {"model_type": "siglip_vision_model", **_SIGHT}


class Family(NamedTuple):
    """A class of transformers, what its config is made with, and the kind of its rows."""

    model: str
    config: dict[str, Any]
    kind: str = "text"


FAMILIES: dict[str, Family] = {
    # Language models.
    "llama": Family("LlamaForCausalLM", _GROUPED),
    "mistral": Family("MistralForCausalLM", {**_GROUPED, "sliding_window": 8}),
    "mixtral": Family(
        "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "output_router_logits": True}
    ),
    "qwen2": Family("Qwen2ForCausalLM", _GROUPED),
    "qwen3": Family("Qwen3ForCausalLM", _HEADS),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma2": Family("Gemma2ForCausalLM", {**_HEADS, "sliding_window": 8}),
    "phi3": Family("Phi3ForCausalLM", _GROUPED),
    "olmo2": Family("Olmo2ForCausalLM", _GROUPED),
    "granite": Family("GraniteForCausalLM", _GROUPED),
    "gpt_oss": Family("GptOssForCausalLM", {**_HEADS, "num_local_experts": 4, "sliding_window": 8}),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {
            **_SIZES,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "vocab_size": _VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", _SIZES),
    "opt": Family(
        "OPTForCausalLM",
        {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "falcon": Family(
        "FalconForCausalLM", {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "bloom": Family(
        "BloomForCausalLM",
        {"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "mamba": Family("MambaForCausalLM", {**_SIZES, "state_size": 8}),
    # Encoders.
    "bert": Family("BertForSequenceClassification", _BERT, "classes"),
    "roberta": Family("RobertaForSequenceClassification", _BERT, "classes"),
    "modernbert": Family("ModernBertForMaskedLM", {**_SIZES, "cls_token_id": 1, "sep_token_id": 2}),
    # From a sequence to another.
    "t5": Family(
        "T5ForConditionalGeneration",
        {
            "vocab_size": _VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": Family("BartForConditionalGeneration", {**_SEQ2SEQ, "max_position_embeddings": 64}),
    # Images.
    "vit": Family("ViTForImageClassification", _VIT, "image classes"),
    "swin": Family(
        "SwinForImageClassification",
        {
            **_QUIET,
            "image_size": 8,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 2,
            "num_labels": 4,
            "drop_path_rate": 0.0,
        },
        "image classes",
    ),
    "resnet": Family(
        "ResNetForImageClassification",
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": 4,
        },
        "image classes",
    ),
    # Images and text.
    "clip": Family("CLIPModel", {"text_config": _SIZES, "vision_config": _SIGHT}, "pairs"),
    "llava": Family(
        "LlavaForConditionalGeneration",
        {
            "text_config": _LLAMA,
            "vision_config": _CLIP_SIGHT,
            "image_token_id": _IMAGE,
            "image_seq_length": _SEEN,
        },
        "image text",
    ),
    "paligemma": Family(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma", **_HEADS},
            "vision_config": {**_SIGLIP_SIGHT, "projection_dim": 32},
            "image_token_id": _IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
        },
        "image text",
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma3_text", **_HEADS, "sliding_window": 8},
            "vision_config": _SIGLIP_SIGHT,
            "image_token_id": _IMAGE,
            "mm_tokens_per_image": _SEEN,
        },
        "image text typed",
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        {
            "text_config": {"model_type": "qwen2", **_GROUPED},
            "vision_config": {
                "model_type": "internvl_vision",
                **_SIGHT,
                "image_size": [16, 16],
                "patch_size": [4, 4],
            },
            "image_token_id": _IMAGE,
            "image_seq_length": _SEEN,
        },
        "wide image text",
    ),
    "blip2": Family(
        "Blip2ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "opt",
                **_SIZES,
                "ffn_dim": 64,
                "dropout": 0.0,
                "word_embed_proj_dim": 32,
            },
            "vision_config": {"model_type": "blip_2_vision_model", **_SIGHT},
            "qformer_config": {
                "model_type": "blip_2_qformer",
                **_SIZES,
                **_QUIET,
                "encoder_hidden_size": 32,
                "cross_attention_frequency": 1,
            },
            "image_token_index": _IMAGE,
            "num_query_tokens": _SEEN,
        },
        "image text",
    ),
    "mllama": Family(
        "MllamaForConditionalGeneration",
        {
            "text_config": {
                "model_type": "mllama_text_model",
                **_GROUPED,
                "cross_attention_layers": [1],
            },
            "vision_config": {
                "model_type": "mllama_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": 8,
                "patch_size": 4,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
            },
            "image_token_index": _IMAGE,
        },
        "image tiled",
    ),
    # Speech.
    "whisper": Family(
        "WhisperForConditionalGeneration",
        {
            **_SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "speech",
    ),
    "wav2vec2": Family(
        "Wav2Vec2ForSequenceClassification",
        {
            **_SIZES,
            "conv_dim": [32, 32],
            "conv_stride": [4, 2],
            "conv_kernel": [4, 2],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_feat_extract_layers": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "feat_proj_dropout": 0.0,
            "layerdrop": 0.0,
            "apply_spec_augment": False,
            "num_labels": 4,
        },
        "wave classes",
    ),
}


def family_model(family: Family) -> Any:
    """Return a family's model, always with the same values."""
    import transformers

    kind: Any = getattr(transformers, family.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(kind.config_class(**family.config))


def _row(kind: str, number: int, generator: torch.Generator) -> dict[str, Any]:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def ids(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    words = ids(12, _VOCABULARY, _LENGTH)
    used = torch.arange(_LENGTH) < (_LENGTH // 2 if number % 3 == 0 else _LENGTH)
    text = {"input_ids": words, "attention_mask": used.long()}
    label = {"labels": number % 4}
    if kind == "text":
        return {**text, "labels": words.where(used, -100)}
    if kind == "classes":
        return {**text, **label}
    if kind == "image classes":
        return {"pixel_values": drawn(3, 8, 8), **label}
    if kind == "pairs":
        return {**text, "pixel_values": drawn(3, 8, 8)}
    if kind == "speech":
        return {"input_features": drawn(8, 16), "labels": words.where(used, -100)}
    if kind == "wave classes":
        return {"input_values": drawn(64), **label}
    # An image before the text; its places are no labels.
    seen = 1 if kind == "image tiled" else _SEEN
    row = {
        "input_ids": torch.cat([torch.full((seen,), _IMAGE), words]),
        "attention_mask": torch.cat([torch.ones(seen).long(), used.long()]),
        "labels": torch.cat([torch.full((seen,), -100), words.where(used, -100)]),
    }
    if kind == "image text typed":
        row["token_type_ids"] = (row["input_ids"] == _IMAGE).long()
    if kind == "image tiled":
        return {
            **row,
            "pixel_values": drawn(1, 1, 3, 8, 8),
            "aspect_ratio_ids": torch.ones(1).long(),
            "aspect_ratio_mask": torch.ones(1, 1).long(),
            "cross_attention_mask": torch.ones(_LENGTH + 1, 1, 1).long(),
        }
    size = 16 if kind == "wide image text" else 8
    return {**row, "pixel_values": drawn(3, size, size)}


def family_rows(family: Family) -> list[dict[str, Any]]:
    """Return what a family trains on: text every third row of which is padded, images, sounds."""
    generator = torch.Generator().manual_seed(1)
    return [_row(family.kind, number, generator) for number in range(NUM_ROWS)]


def family_collator(family: Family) -> Callable[[Any], Any] | None:
    """What makes a batch of rows, where the default will not do."""
    import transformers

    if family.kind == "pairs":  # a model of pairs is asked for its loss
        return lambda rows: {**transformers.default_data_collator(rows), "return_loss": True}
    return None
