"""Small Hugging Face models with batch norm in training mode, and a batch of five samples for each.

The weights are random and nothing is downloaded. Dropout and stochastic depth are off, and the loss is a mean over
samples of what a model returns, so that the gradient of the whole batch is one number a weight. A backbone whose norms
are frozen (as in DETR and most of its children) does not count, and is not here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures import CLASSES, STILL, VIT, VOCAB, in_double, make
from bigbatch.core.batch_norm import BATCH_NORM
from laws import Case

SAMPLES = 5

Inputs = Callable[[], dict[str, Tensor]]

FOUR = {"depths": [1] * 4}
PYRAMID = {**FOUR, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "drop_path_rate": 0.0}
LABELS = {"num_labels": CLASSES}
PLAIN_VIT = {name: value for name, value in VIT.items() if name != "num_labels"}
DEEPER_VIT = {**PLAIN_VIT, "num_hidden_layers": 4}
MOBILENET = {"depth_multiplier": 0.25, "min_depth": 4, "classifier_dropout_prob": 0.0, **LABELS}
MOBILENET2 = {**MOBILENET, "depth_divisible_by": 4}
EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.1, "depth_divisor": 4, "hidden_dim": 320,
             "kernel_sizes": [3, 3, 5, 3], "in_channels": [32, 16, 24, 40], "out_channels": [16, 24, 40, 48],
             "strides": [1, 2, 2, 1], "num_block_repeats": [1, 1, 2, 1], "expand_ratios": [1, 2, 2, 1],
             "depthwise_padding": [], "drop_connect_rate": 0.0, "image_size": 32}  # fmt: skip
LEVIT = {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
         "key_dim": [8, 8, 8], "drop_path_rate": 0, "attention_ratio": [2, 2, 2], "mlp_ratio": [2, 2, 2],
         **LABELS}  # fmt: skip
MOBILEVIT = {**STILL, "classifier_dropout_prob": 0.0, "image_size": 64, "hidden_sizes": [16, 16, 16],
             "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16], "num_attention_heads": 2, "expand_ratio": 2.0,
             **LABELS}  # fmt: skip
MOBILEVIT2 = {"image_size": 64, "width_multiplier": 0.1, "n_attn_blocks": [1, 1, 1], "expand_ratio": 1.0,
              "ffn_dropout": 0.0, "attn_dropout": 0.0, "classifier_dropout_prob": 0.0,
              "base_attn_unit_dims": [32, 48, 64], **LABELS}  # fmt: skip
ATROUS = {"aspp_out_channels": 8, "atrous_rates": [2, 4, 6], "aspp_dropout_prob": 0.0}
CVT = {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3], "drop_path_rate": [0.0] * 3,
       "drop_rate": [0.0] * 3, "attention_drop_rate": [0.0] * 3, "mlp_ratio": [2.0] * 3, **LABELS}  # fmt: skip
SEGMENTS = {**VIT, "num_hidden_layers": 4, "drop_path_rate": 0.0, "out_indices": [0, 1, 2, 3], "pool_scales": [1, 2],
            "auxiliary_channels": 8}  # fmt: skip
DPT = {**DEEPER_VIT, "is_hybrid": False, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16],
       "fusion_hidden_size": 8, "use_batch_norm_in_fusion_residual": True}  # fmt: skip
ZOE = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8, "bottleneck_features": 8,
       "num_relative_features": 4, "bin_embedding_dim": 8, "num_attractors": [4, 3, 2, 1],
       "bin_configurations": [{"n_bins": 4, "min_depth": 0.1, "max_depth": 10.0, "name": "room"}],
       "use_batch_norm_in_fusion_residual": True,
       "backbone_config": {"model_type": "beit", **DEEPER_VIT, "drop_path_rate": 0.0, "out_indices": [1, 2, 3, 4],
                           "reshape_hidden_states": False}}  # fmt: skip
DINO = {"model_type": "dinov2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "intermediate_size": 16, "use_mask_token": False}  # fmt: skip
DEPTH_PRO = {"patch_size": 16, "fusion_hidden_size": 8, "intermediate_hook_ids": [1, 0],
             "intermediate_feature_dims": [8, 8], "scaled_images_ratios": [0.5, 1.0],
             "scaled_images_overlap_ratios": [0.0, 0.25], "scaled_images_feature_dims": [8, 8],
             "use_batch_norm_in_fusion_residual": True, "image_model_config": DINO, "patch_model_config": DINO,
             "fov_model_config": DINO}  # fmt: skip
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "layer_type": "basic", **FOUR,
          "out_features": ["stage1", "stage2", "stage3", "stage4"]}  # fmt: skip
LAST = ["stage2", "stage3", "stage4"]
DETR_RESNET = {**RESNET, "model_type": "rt_detr_resnet", "out_features": LAST}
HGNET = {"hidden_sizes": [8, 16, 16, 24], "embedding_size": 8, **FOUR, "stem_channels": [3, 8, 8],
         "stage_in_channels": [8, 8, 16, 16], "stage_mid_channels": [8] * 4, "stage_out_channels": [8, 16, 16, 24],
         "stage_num_blocks": [1] * 4, "stage_downsample": [False, True, True, True],
         "stage_light_block": [False, False, True, True], "stage_kernel_size": [3, 3, 5, 5],
         "stage_numb_of_layers": [2] * 4}  # fmt: skip
DETR_HGNET = {"model_type": "hgnet_v2", **HGNET, "out_features": LAST}
WIDE_HGNET = {**DETR_HGNET, "hidden_sizes": [128, 16, 16, 24], "stage_in_channels": [8, 128, 16, 16],
              "stage_out_channels": [128, 16, 16, 24], "out_features": ["stage1", *LAST]}  # fmt: skip
DETECTION = {"encoder_hidden_dim": 16, "encoder_in_channels": [8, 16, 16], "encoder_ffn_dim": 16,
             "encoder_attention_heads": 2, "num_queries": 6, "decoder_in_channels": [16, 16, 16],
             "decoder_ffn_dim": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "num_denoising": 0,
             "freeze_backbone_batch_norms": False, **LABELS}  # fmt: skip
WITH_RESNET = {**DETECTION, "d_model": 16, "backbone_config": DETR_RESNET}
WITH_HGNET = {**DETECTION, "d_model": 16, "backbone_config": DETR_HGNET, "encoder_in_channels": [16, 16, 24]}
POINTERS = {"gp_dropout_value": 0.0, "global_pointer_head_size": 8}
READING = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 1, **STILL,
           "coordinate_size": 3, "shape_size": 2, "num_classes": CLASSES, "global_pointer_head_size": 8}  # fmt: skip
LW_DETR = {"projector_scale_factors": [1.0], "d_model": 16, "decoder_ffn_dim": 16, "decoder_layers": 2,
           "decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2, "num_queries": 4, "group_detr": 2,
           "backbone_config": {"model_type": "lw_detr_vit", "hidden_size": 16, "num_hidden_layers": 2,
                               "num_attention_heads": 2, "mlp_ratio": 2, "image_size": 64, "pretrain_image_size": 64,
                               "num_windows": 4, "window_block_indices": [0], "out_indices": [1, 2]},
           **LABELS}  # fmt: skip
OMDET = {"backbone_config": {**RESNET, "out_features": LAST}, "apply_layernorm_after_vision_backbone": False,
         "image_size": 64, "text_projection_in_dim": 16, "text_projection_out_dim": 16, "class_embed_dim": 16,
         "task_encoder_hidden_dim": 16, "num_queries": 6, "encoder_hidden_dim": 24,
         "vision_features_channels": [24, 24, 24], "encoder_in_channels": [8, 16, 16], "encoder_attention_heads": 2,
         "encoder_dim_feedforward": 16, "decoder_hidden_dim": 24, "decoder_num_heads": 2, "decoder_num_layers": 1,
         "decoder_dim_feedforward": 16, "disable_custom_kernels": True,
         "text_config": {"model_type": "clip_text_model", "vocab_size": VOCAB, "hidden_size": 16,
                         "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2,
                         "projection_dim": 16}}  # fmt: skip
MASKS = {"backbone_config": RESNET, "encoder_feedforward_dim": 16, "dim_feedforward": 16, "encoder_layers": 1,
         "decoder_layers": 2, "num_attention_heads": 2, "hidden_dim": 32, **LABELS}  # fmt: skip
DETR = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 32,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 4, "dropout": 0.0,
        "model_type": "detr", "backbone_config": {**RESNET, "out_features": ["stage4"]}, **LABELS}  # fmt: skip
ONEFORMER = {**MASKS, "conv_dim": 32, "mask_dim": 32, "query_dec_layers": 1, "num_queries": 6, "task_seq_len": 7,
             "text_encoder_width": 16, "text_encoder_context_length": 7, "text_encoder_num_layers": 1,
             "text_encoder_vocab_size": VOCAB, "text_encoder_n_ctx": 2, "is_training": False,
             "dropout": 0.0}  # fmt: skip
BLOCKS = [[[3, 8, 8, 1, False]], [[3, 8, 8, 2, False]], [[3, 8, 16, 2, False]],
          [[3, 16, 16, 2, False], [5, 16, 16, 1, True]], [[5, 16, 16, 2, True]]]  # fmt: skip
ALL_BUT_ONE = [*LAST, "stage5"]
LCNET = {"block_configs": BLOCKS, "stem_channels": 8}
LCNET3 = {**LCNET, "model_type": "pp_lcnet_v3", "conv_symmetric_num": 1}
TALL = [[[3, 8, 8, 1, True]], [[3, 8, 8, 1, False]], [[3, 8, 16, [2, 1], False]], [[3, 16, 16, [2, 1], False]]]
SQUARE = [[[3, 8, 8, 1, True]], [[3, 8, 8, 2, False]], [[3, 8, 16, 2, False]], [[3, 16, 16, 2, False]]]
LCNET4 = {"model_type": "pp_lcnet_v4", "stem_channels": [3, 8, 8]}
TALL4 = {**LCNET4, "block_configs": TALL, "out_features": ["stage4"]}
SQUARE4 = {**LCNET4, "block_configs": SQUARE, "out_features": ["stage1", *LAST]}
LETTERS = {"hidden_size": 8, "depth": 1, "head_out_channels": 12, "num_attention_heads": 2}
STRIPES = {"vertical_long_to_small_conv": lambda k: [[k, 1], [1, 1], [k // 2, 0]],
           "horizontal_small_to_long_conv": lambda k: [[1, k], [1, 1], [0, k // 2]],
           "symmetric_conv_long": lambda k: [[k, k], [1, 1], [k // 2, k // 2]]}  # fmt: skip
INTRACLASS = {f"{name}_{ratio}": stripe(k) for name, stripe in STRIPES.items()
              for ratio, k in (("longratio", 7), ("midratio", 5), ("shortratio", 3))}  # fmt: skip
SERVER = {"neck_out_channels": 16, "scale_factor_list": [1, 2, 4, 8], "kernel_list": [3, 2, 2],
          "intraclass_block_config": {**INTRACLASS, "reduce_channel": [1, 1, 0],
                                      "return_channel": [1, 1, 0]}}  # fmt: skip
UVDOC = {"backbone_config": {"model_type": "uvdoc_backbone", "resnet_head": [[3, 4], [4, 4]],
                             "resnet_configs": [[[4, 4, 1, False]], [[4, 8, 2, True]], [[8, 16, 2, True]]],
                             "stage_configs": [[[16, 1]], [[16, 2]], [[16, 3], [16, 1]]],
                             "out_features": ["stage1", "stage2", "stage3"]},
         "bridge_connector": [16, 16], "out_point_positions2D": [[16, 8], [8, 2]]}  # fmt: skip
VITMATTE = {"hidden_size": 16, "convstream_hidden_sizes": [4, 8, 12], "fusion_hidden_sizes": [16, 8, 8, 4],
            "backbone_config": {"model_type": "vitdet", "hidden_size": 16, "num_hidden_layers": 1,
                                "num_attention_heads": 2, "image_size": 64, "patch_size": 16, "num_channels": 4,
                                "out_features": ["stage1"]}}  # fmt: skip
POSE = {"model_type": "vitpose_backbone", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "image_size": [32, 32], "patch_size": [8, 8], "out_indices": [1], **STILL}  # fmt: skip
LOFTR = {"stage_num_blocks": [1] * 4, "out_features": [8, 8, 16, 16], "stage_stride": [2, 1, 2, 2], "hidden_size": 16,
         "num_attention_layers": 1, "num_attention_heads": 8, "q_aggregation_kernel_size": 2,
         "kv_aggregation_kernel_size": 2, "q_aggregation_stride": 2, "kv_aggregation_stride": 2}  # fmt: skip
WAVES = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 16, "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0,
         "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "conv_dim": [8, 8], "conv_stride": [4, 4],
         "conv_kernel": [8, 4], "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "apply_spec_augment": False}  # fmt: skip
SEAMLESS = {"vocab_size": VOCAB, "t2u_vocab_size": VOCAB, "hidden_size": 16, "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0, "dropout": 0.0, "attention_dropout": 0.0, "encoder_layers": 1,
            "encoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_layers": 1, "decoder_ffn_dim": 16,
            "decoder_attention_heads": 2, "speech_encoder_layers": 1, "speech_encoder_attention_heads": 2,
            "speech_encoder_intermediate_size": 16, "speech_encoder_layerdrop": 0.0,
            "feature_projection_input_dim": 12, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
            "adaptor_kernel_size": 3, "adaptor_stride": 2, "adaptor_dropout": 0.0, "max_source_positions": 64,
            "conv_depthwise_kernel_size": 3, "max_position_embeddings": 32}  # fmt: skip
CONFORMER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
             "conv_kernel_size": 3, "subsampling_conv_channels": 4, "num_mel_bins": 16, "dropout": 0.0,
             "layerdrop": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
GRANITE = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
           "num_attention_heads": 2, "num_mel_bins": 4, "context_size": 8, "conv_kernel_size": 3,
           "max_position_embeddings": 16, "subsample_layers": [1]}  # fmt: skip
SERIES = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8}
PATCHES = {**SERIES, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16}
INFORMER = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 1,
            "d_model": 8, "encoder_layers": 3, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
            "dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "attention_dropout": 0.0,
            "activation_dropout": 0.0, "attention_type": "full"}  # fmt: skip
SPEECH_T5 = {"vocab_size": VOCAB, "hidden_size": 16, "encoder_layers": 1, "encoder_attention_heads": 2,
             "encoder_ffn_dim": 16, "encoder_layerdrop": 0.0, "decoder_layers": 1, "decoder_ffn_dim": 16,
             "decoder_attention_heads": 2, "decoder_layerdrop": 0.0, "positional_dropout": 0.0, "hidden_dropout": 0.0,
             "attention_dropout": 0.0, "activation_dropout": 0.0, "num_mel_bins": 8, "speech_decoder_prenet_units": 8,
             "speech_decoder_prenet_dropout": 0.0, "speaker_embedding_dim": 4, "speech_decoder_postnet_layers": 2,
             "speech_decoder_postnet_units": 8, "speech_decoder_postnet_dropout": 0.0, "reduction_factor": 1,
             "max_speech_positions": 32, "max_text_positions": 32, "encoder_max_relative_position": 8}  # fmt: skip
FAST_SPEECH = {"hidden_size": 16, "vocab_size": VOCAB, "num_mel_bins": 8, "encoder_layers": 1,
               "encoder_linear_units": 16, "decoder_layers": 1, "decoder_linear_units": 16,
               "speech_decoder_postnet_layers": 2, "speech_decoder_postnet_units": 8, "encoder_kernel_size": 3,
               "decoder_kernel_size": 3, "duration_predictor_channels": 8, "energy_predictor_channels": 8,
               "pitch_predictor_channels": 8, "pitch_predictor_layers": 2, "pitch_predictor_kernel_size": 3,
               "energy_predictor_dropout": 0.0, "pitch_predictor_dropout": 0.0, "encoder_dropout_rate": 0.0,
               "encoder_positional_dropout_rate": 0.0, "encoder_attention_dropout_rate": 0.0,
               "decoder_dropout_rate": 0.0, "decoder_positional_dropout_rate": 0.0,
               "decoder_attention_dropout_rate": 0.0, "duration_predictor_dropout_rate": 0.0,
               "speech_decoder_postnet_dropout": 0.0, "use_masking": False}  # fmt: skip
CLAP = {"window_size": 4, "num_mel_bins": 16, "spec_size": 64, "patch_size": 4, "patch_stride": [4, 4],
        "hidden_size": 32, "depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2,
        "patch_embeds_hidden_size": 16, "hidden_dropout_prob": 0.0}  # fmt: skip
SAM_TEXT = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "projection_dim": 8,
            "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 8,
            "repmixer_kernel_size": 3, "layer_scale_init_value": 1.0}  # fmt: skip


class Chosen(nn.Module):
    """A model that returns only what the loss needs: the tensors in some fields of its output."""

    def __init__(self, model: nn.Module, fields: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.fields = model, fields

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        outputs, samples = self.model(**inputs), len(next(iter(inputs.values())))
        values = (outputs[field] for field in self.fields)
        parts = [part for value in values for part in ([value] if isinstance(value, Tensor) else value)]
        return tuple(part if len(part) == samples else part.unflatten(0, (samples, -1)) for part in parts)


def awake(model: nn.Module) -> nn.Module:
    """Weights drawn for wide layers let the signal of a narrow model die, and all gradients but the last with it."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    for module in model.modules():
        if isinstance(module, BATCH_NORM):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model


def mean_over_samples(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
    """The loss of every model here."""
    terms = [F.mse_loss(output, target) for output, target in zip(outputs, targets, strict=True)]
    return torch.stack(terms).sum()


@functools.cache
def built(name: str) -> tuple[nn.Module, dict[str, Tensor], tuple[Tensor, ...]]:
    """A model, its inputs, and targets as its outputs are shaped; to be copied, which is quicker than to build."""
    kind, config, options, inputs, fields = ARCHITECTURES[name]
    with in_double(), torch.random.fork_rng(devices=[]):
        model = Chosen(awake(make(kind, config, **copy.deepcopy(options))()), fields)
        batch = inputs()
        with torch.no_grad():
            outputs = copy.deepcopy(model)(**batch)
        return model, batch, tuple(torch.randn_like(output) for output in outputs)


def images(side: int = 32, channels: int = 3) -> Inputs:
    return lambda: {"pixel_values": torch.randn(SAMPLES, channels, side, side)}


def sounds(steps: int = 40, bins: int = 16) -> Inputs:
    return lambda: {"input_features": torch.randn(SAMPLES, steps, bins)}


def tokens(length: int, *, lowest: int = 3) -> Tensor:
    return torch.randint(lowest, VOCAB, (SAMPLES, length))


def waves() -> dict[str, Tensor]:
    return {"input_values": torch.randn(SAMPLES, 200)}


def series() -> dict[str, Tensor]:
    return {"past_values": torch.randn(SAMPLES, 16, 2)}


def dated() -> dict[str, Tensor]:
    past, future = torch.randn(SAMPLES, 14, 1), torch.randn(SAMPLES, 4, 1)
    return {"past_values": torch.randn(SAMPLES, 14), "past_time_features": past,
            "past_observed_mask": torch.ones(SAMPLES, 14), "future_values": torch.randn(SAMPLES, 4),
            "future_time_features": future}  # fmt: skip


def spoken() -> dict[str, Tensor]:
    heard = torch.randn(SAMPLES, 10, 8)
    return {"input_ids": tokens(7), "decoder_input_values": heard, "speaker_embeddings": torch.randn(SAMPLES, 4)}


def read_aloud() -> dict[str, Tensor]:
    return {"input_ids": tokens(6), "attention_mask": torch.ones(SAMPLES, 6, dtype=torch.long),
            "spectrogram_labels": torch.randn(SAMPLES, 12, 8), "pitch_labels": torch.randn(SAMPLES, 6, 1),
            "duration_labels": torch.full((SAMPLES, 6), 2), "energy_labels": torch.randn(SAMPLES, 6, 1)}  # fmt: skip


def named() -> dict[str, Tensor]:
    """One class a picture, so that every field has one row a sample."""
    mask = torch.ones(SAMPLES, 6, dtype=torch.long)
    return {**images(64)(), "classes_input_ids": tokens(6), "classes_attention_mask": mask,
            "tasks_input_ids": tokens(6), "tasks_attention_mask": mask,
            "classes_structure": torch.ones(SAMPLES, dtype=torch.long)}  # fmt: skip


def seen(name: str, options: Mapping[str, Any], side: int = 32) -> tuple[Any, ...]:
    return f"{name}ForImageClassification", f"{name}Config", {**LABELS, **options}, images(side), LOGITS


def found(name: str, options: Mapping[str, Any], *more: str) -> tuple[Any, ...]:
    return f"{name}ForObjectDetection", f"{name}Config", options, images(64), ("logits", "pred_boxes", *more)


def segmented(name: str, options: Mapping[str, Any], side: int = 32) -> tuple[Any, ...]:
    return f"{name}ForSemanticSegmentation", f"{name}Config", {**LABELS, **options}, images(side), LOGITS


def measured(name: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
    return f"{name}ForDepthEstimation", f"{name}Config", options, images(), ("predicted_depth",)


def written(name: str, task: str, options: Mapping[str, Any], side: int = 64) -> tuple[Any, ...]:
    return f"PPOCR{name}For{task}", f"PPOCR{name}Config", options, images(side), HIDDEN


LOGITS, HIDDEN, MAPS = ("logits",), ("last_hidden_state",), ("feature_maps",)
DETECTED, READ = "ObjectDetection", "TextRecognition"
MASKED = ("class_queries_logits", "masks_queries_logits")

ARCHITECTURES: dict[str, tuple[str, str, Mapping[str, Any], Inputs, tuple[str, ...]]] = {
    "ResNet": seen("ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}),
    "RegNet": seen("RegNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}),
    "MobileNetV1": seen("MobileNetV1", MOBILENET),
    "MobileNetV2": seen("MobileNetV2", MOBILENET2),
    "MobileNetV2 segments": segmented("MobileNetV2", {**MOBILENET2, "output_stride": 32}),
    "EfficientNet": seen("EfficientNet", {**EFFICIENT, "dropout_rate": 0.0}),
    "LeViT": seen("Levit", LEVIT, 64),
    "LeViT and teacher": ("LevitForImageClassificationWithTeacher", "LevitConfig", LEVIT, images(64), LOGITS),
    "MobileViT": seen("MobileViT", MOBILEVIT, 64),
    "MobileViT segments": segmented("MobileViT", {**MOBILEVIT, **ATROUS}, 64),
    "MobileViTV2": seen("MobileViTV2", MOBILEVIT2, 64),
    "MobileViTV2 segments": segmented("MobileViTV2", {**MOBILEVIT2, **ATROUS}, 64),
    "CvT": seen("Cvt", CVT),
    "SwiftFormer": seen("SwiftFormer", {**FOUR, "embed_dims": [8, 16, 16, 24], "mlp_ratio": 2, "drop_path_rate": 0.0,
                                        "drop_mlp_rate": 0.0, "drop_conv_encoder_rate": 0.0}, 64),
    "TextNet": seen("TextNet", {
        "image_size": [32, 32], "stem_out_channels": 8, "hidden_sizes": [8, 8, 16, 16, 16],
        "conv_layer_kernel_sizes": [[[3, 3]], [[3, 3], [1, 3]], [[3, 3], [3, 1]], [[3, 3]]],
        "conv_layer_strides": [[1], [2, 1], [2, 1], [2]]}),
    "HGNetV2": seen("HGNetV2", HGNET, 64),
    "PP-LCNet": ("PPLCNetForImageClassification", "PPLCNetConfig",
                 {**LCNET, "class_expand": 16, "hidden_dropout_prob": 0.0, **LABELS}, images(64), HIDDEN),
    "PP-LCNetV3": ("PPLCNetV3Backbone", "PPLCNetV3Config",
                   {**LCNET, "conv_symmetric_num": 2, "out_features": ALL_BUT_ONE}, images(64), MAPS),
    "PP-LCNetV4": ("PPLCNetV4Backbone", "PPLCNetV4Config", {k: v for k, v in SQUARE4.items() if k != "model_type"},
                   images(64), MAPS),
    "ALIGN": ("AlignVisionModel", "AlignVisionConfig", {**EFFICIENT, "hidden_dim": 48}, images(), HIDDEN),
    "SegFormer": segmented("Segformer", {**STILL, **PYRAMID, "classifier_dropout_prob": 0.0,
                                         "decoder_hidden_size": 16}),
    "UperNet": segmented("UperNet", {"backbone_config": RESNET, "hidden_size": 16, "pool_scales": [1, 2],
                                     "auxiliary_channels": 8, "auxiliary_in_channels": 16}, 64),
    "BEiT segments": segmented("Beit", SEGMENTS),
    "Data2VecVision segments": segmented("Data2VecVision", SEGMENTS),
    "DPT": measured("DPT", DPT),
    "DPT segments": segmented("DPT", {**DPT, "semantic_classifier_dropout": 0.0, "use_auxiliary_head": False}),
    "GLPN": measured("GLPN", {**STILL, **PYRAMID, "num_encoder_blocks": 4, "decoder_hidden_size": 8}),
    "ZoeDepth": measured("ZoeDepth", ZOE),
    "DepthPro": measured("DepthPro", DEPTH_PRO),
    "RT-DETR": found("RTDetr", WITH_RESNET),
    "RT-DETRv2": found("RTDetrV2", WITH_RESNET),
    "D-FINE": found("DFine", WITH_HGNET),
    "DEIMv2": found("Deimv2", WITH_HGNET),
    "LW-DETR": found("LwDetr", LW_DETR),
    "PP-DocLayoutV2": found("PPDocLayoutV2", {**WITH_HGNET, "class_thresholds": [0.5] * CLASSES,
                                              "class_order": [*range(CLASSES)], "reading_order_config": READING}),
    "PP-DocLayoutV3": found("PPDocLayoutV3", {**WITH_HGNET, **POINTERS, "backbone_config": WIDE_HGNET,
                                              "mask_feature_channels": [8, 8], "num_prototypes": 4},
                            "out_masks"),
    "PP-DocLayoutV4": found("PPDocLayoutV4", {**{k: v for k, v in WITH_HGNET.items() if k != "d_model"}, **POINTERS,
                                              "hidden_size": 16}),
    "OmDet-Turbo": ("OmDetTurboForObjectDetection", "OmDetTurboConfig", OMDET, named,
                    ("decoder_coord_logits", "decoder_class_logits")),
    "Mask2Former": ("Mask2FormerForUniversalSegmentation", "Mask2FormerConfig",
                    {**MASKS, "feature_size": 32, "mask_feature_size": 32, "num_queries": 4}, images(64), MASKED),
    "MaskFormer": ("MaskFormerForInstanceSegmentation", "MaskFormerConfig",
                   {"backbone_config": RESNET, "fpn_feature_size": 32, "mask_feature_size": 32,
                    "decoder_config": DETR, **LABELS}, images(64), MASKED),
    "OneFormer": ("OneFormerForUniversalSegmentation", "OneFormerConfig", ONEFORMER,
                  lambda: {**images(64)(), "task_inputs": tokens(7).double()}, MASKED),
    "PP-OCRv5 mobile detection": written("V5MobileDet", DETECTED, {
        "backbone_config": {**LCNET3, "out_features": ALL_BUT_ONE}, "neck_out_channels": 16,
        "layer_list_out_channels": [8, 8, 8, 8]}),
    "PP-OCRv5 mobile recognition": written("V5MobileRec", READ, {
        **LETTERS, "backbone_config": {**LCNET3, "out_features": ["stage5"]}}, 96),
    "PP-OCRv5 server detection": written("V5ServerDet", DETECTED, {
        **SERVER, "backbone_config": {**DETR_HGNET, "out_features": ["stage1", *LAST]}}),
    "PP-OCRv5 server recognition": written("V5ServerRec", READ, {
        **LETTERS, "backbone_config": {**DETR_HGNET, "out_features": ["stage4"]}}, 96),
    "PP-OCRv6 small detection": written("V6SmallDet", DETECTED, {
        "backbone_config": SQUARE4, "neck_out_channels": 16, "layer_list_out_channels": [8, 8, 16, 16]}),
    "PP-OCRv6 medium detection": written("V6MediumDet", DETECTED, {**SERVER, "backbone_config": SQUARE4}),
    "PP-OCRv6 small recognition": written("V6SmallRec", READ, {**LETTERS, "backbone_config": TALL4}, 48),
    "PP-OCRv6 tiny recognition": written("V6TinyRec", READ, {"hidden_size": 8, "head_out_channels": 12,
                                                            "backbone_config": TALL4}, 48),
    "SLANet": ("SLANetForTableRecognition", "SLANetConfig",
               {"backbone_config": {**LCNET, "model_type": "pp_lcnet", "out_features": ALL_BUT_ONE},
                "post_conv_out_channels": 8, "out_channels": 6, "hidden_size": 16, "max_text_length": 0},
               images(64), HIDDEN),
    "UVDoc": ("UVDocModel", "UVDocConfig", UVDOC, images(64), HIDDEN),
    "ViTMatte": ("VitMatteForImageMatting", "VitMatteConfig", VITMATTE, images(64, 4), ("alphas",)),
    "ViTPose": ("VitPoseForPoseEstimation", "VitPoseConfig",
                {"backbone_config": POSE, "use_simple_decoder": False, **LABELS}, images(), ("heatmaps",)),
    "EfficientLoFTR": ("EfficientLoFTRModel", "EfficientLoFTRConfig", LOFTR,
                       lambda: {"pixel_values": torch.rand(SAMPLES, 2, 3, 64, 64)}, MAPS),
    "CLAP": ("ClapAudioModel", "ClapAudioConfig", CLAP,
             lambda: {"input_features": torch.randn(SAMPLES, 1, 64, 16)}, ("pooler_output",)),
    "Wav2Vec2-Conformer": ("Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig",
                           {**WAVES, "conv_depthwise_kernel_size": 3, "conformer_conv_dropout": 0.0}, waves, LOGITS),
    "HuBERT": ("HubertForCTC", "HubertConfig", {**WAVES, "conv_pos_batch_norm": True}, waves, LOGITS),
    "SeamlessM4T": ("SeamlessM4TForSpeechToText", "SeamlessM4TConfig", SEAMLESS,
                    lambda: {**sounds(20, 12)(), "decoder_input_ids": tokens(6, lowest=4)}, LOGITS),
    "LASR": ("LasrForCTC", "LasrCTCConfig",
             {"vocab_size": 12, "encoder_config": {**CONFORMER, "conv_kernel_size": 4}}, sounds(), LOGITS),
    "Parakeet": ("ParakeetForCTC", "ParakeetCTCConfig",
                 {"vocab_size": 12, "pad_token_id": 11, "encoder_config": CONFORMER}, sounds(), LOGITS),
    "Parakeet transducer": ("ParakeetForRNNT", "ParakeetRNNTConfig",
                            {"vocab_size": VOCAB, "pad_token_id": 2, "blank_token_id": 1, "decoder_hidden_size": 8,
                             "num_decoder_layers": 1, "encoder_config": CONFORMER},
                            lambda: {**sounds()(), "decoder_input_ids": tokens(4)}, LOGITS),
    "Granite Speech 5": ("GraniteSpeech5ForCTC", "GraniteSpeech5CTCConfig",
                         {"vocab_size": 12, "encoder_config": GRANITE}, sounds(32, 16), LOGITS),
    "SpeechT5": ("SpeechT5ForTextToSpeech", "SpeechT5Config", SPEECH_T5, spoken, ("spectrogram",)),
    "FastSpeech2Conformer": ("FastSpeech2ConformerModel", "FastSpeech2ConformerConfig", FAST_SPEECH, read_aloud,
                             ("spectrogram", "duration_outputs", "pitch_outputs", "energy_outputs")),
    "PatchTST": ("PatchTSTForPrediction", "PatchTSTConfig", {**PATCHES, "prediction_length": 4}, series,
                 ("prediction_outputs",)),
    "PatchTSMixer": ("PatchTSMixerForPrediction", "PatchTSMixerConfig",
                     {**SERIES, "num_layers": 2, "norm_mlp": "BatchNorm", "dropout": 0.0, "head_dropout": 0.0,
                      "prediction_length": 4}, series, ("prediction_outputs",)),
    "Informer": ("InformerForPrediction", "InformerConfig", INFORMER, dated, ("params",)),
    "SAM 3 text": ("Sam3LiteTextTextModel", "Sam3LiteTextTextConfig", SAM_TEXT, lambda: {"input_ids": tokens(8)},
                   HIDDEN),
}  # fmt: skip


def case_of(name: str) -> Case:
    """The model, its batch and the loss, as the laws take them."""
    return Case(
        name,
        lambda: copy.deepcopy(built(name)[0]),
        lambda: copy.deepcopy(built(name)[1:]),
        lambda: mean_over_samples,
        reduction="mean",
    )


CASES = {name: case_of(name) for name in ARCHITECTURES}
