"""Small networks of the families that people use, for benchmarks/conversion.py.

Each entry builds a network with random weights and an example of its arguments. One whose package
is not installed is left out, and named.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

Built = tuple[nn.Module, Any]

WORDS = torch.arange(24).view(2, 12) % 32
ENDS = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
ENCODER = {**ENDS, **LAYERS, "intermediate_size": 128, "max_position_embeddings": 16}
DECODER = {**ENCODER, "num_key_value_heads": 4}
PICTURES = {**LAYERS, "intermediate_size": 128, "image_size": 32, "patch_size": 8}
# The two sides of an encoder with a decoder.
SIDES = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
}
BOTH = {**ENDS, **SIDES, "max_position_embeddings": 16, "decoder_start_token_id": 0}


def built(package: str, kind: str, example: Any, **options: Any) -> Callable[[], Built]:
    """A network that a function or class of a package makes."""
    return lambda: (getattr(importlib.import_module(package), kind)(**options), example)


def of_transformers(kind: str, example: Any, **sizes: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        network = getattr(transformers, kind)
        return network(network.config_class(**sizes)), example

    return build


def decoder(name: str, **sizes: Any) -> Callable[[], Built]:
    return of_transformers(f"{name}ForCausalLM", WORDS, **{**DECODER, **sizes})


def of_timm(name: str, size: int, **options: Any) -> Callable[[], Built]:
    example = torch.randn(2, 3, size, size)
    return built("timm", "create_model", example, model_name=name, num_classes=10, **options)


def detector(name: str, **options: Any) -> Callable[[], Built]:
    """A detector of torchvision, which is planned by its parts."""
    images = [torch.rand(3, 128, 128) for _ in range(2)]
    plain = {"weights": None, "weights_backbone": None}
    return built("torchvision.models.detection", name, images, **plain, **options)


def transformer_detector(kind: str, resnet: str, stages: list[str], **sizes: Any) -> Built:
    """DETR or RT-DETR, with a small ResNet."""
    import transformers

    body = getattr(transformers, resnet)(**RESNET, out_features=stages)
    own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    options = {"backbone_config": body, **own, **SIDES, **QUERIES, **sizes}
    return of_transformers(f"{kind}ForObjectDetection", torch.rand(2, 3, 64, 64), **options)()


class Speech(nn.Module):
    """Convolutions over a spectrogram, recurrent layers in both directions, letters."""

    def __init__(self, kind: type[nn.RNNBase], proj_size: int = 0) -> None:
        super().__init__()
        self.stem = nn.Conv1d(40, 64, 5, 2, padding=2)
        options: dict[str, Any] = {"proj_size": proj_size} if proj_size else {}
        self.cells = kind(64, 64, 2, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(2 * (proj_size or 64), 29)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(F.relu(self.stem(x)).transpose(1, 2))[0])


def discriminator() -> Built:
    """Strided convolutions, each divided by the largest singular value of its weight."""
    sizes = (3, 32, 64, 128)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [spectral_norm(nn.Conv2d(before, after, 4, 2, 1)), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, spectral_norm(nn.Conv2d(128, 1, 4))), torch.randn(2, 3, 32, 32)


class Messages(nn.Module):
    """A graph network: nodes add up what they hear along edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            y = layer(x)
            heard = torch.zeros_like(y)
            x = F.relu(heard.index_add(0, edges[1], y[edges[0]]))
        return self.head(x)


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)
        self.inner = nn.Transformer(64, 8, 2, 2, 128, batch_first=True)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(wanted.shape[1])
        return self.head(self.inner(self.words(given), self.words(wanted), tgt_mask=mask))


GRAPH = (torch.randn(12, 16), torch.stack([torch.arange(12), torch.arange(12).roll(3)]))
NOISE = {
    "sample": torch.randn(2, 4, 16, 16),
    "timestep": torch.tensor([1, 2]),
    "encoder_hidden_states": torch.randn(2, 6, 32),
}
UNET = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
MEL = {"input_features": torch.randn(2, 16, 32), "decoder_input_ids": WORDS}
WHISPER = {"num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 16}
PAIR = {"input_ids": WORDS, "decoder_input_ids": WORDS}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
GPT2 = {**ENDS, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 16}
T5 = {**ENDS, "d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 8}
BLOOM = {**ENDS, "hidden_size": 64, "n_layer": 2, "n_head": 8}
MPT = {**ENDS, "d_model": 64, "n_layers": 2, "n_heads": 8, "max_seq_len": 16}
RWKV = {**ENDS, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 16}
XLNET = {**ENDS, "d_model": 64, "n_layer": 2, "n_head": 8, "d_inner": 128}
LATENT = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
HEADS = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4}
FRAMES = (torch.rand(2, 3, 128, 128), torch.rand(2, 3, 128, 128))
SOUND = torch.randn(2, 800)
SPEECH = {
    **LAYERS,
    "intermediate_size": 128,
    "vocab_size": 32,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
SEGFORMER = {
    "hidden_sizes": [16, 32, 64, 64],
    "num_attention_heads": [1, 2, 4, 8],
    "depths": [1, 1, 1, 1],
    "decoder_hidden_size": 64,
    "num_labels": 5,
}
SCALE = {"min_size": 128, "max_size": 128}
BOXES = {"rpn_post_nms_top_n_test": 50, "box_detections_per_img": 10, "box_score_thresh": 0.0}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
RESNET = {
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 96, 128],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
QUERIES = {"num_queries": 10, "num_labels": 4}
MAPS = {
    "encoder_layers": 1,
    "encoder_hidden_dim": 64,
    "encoder_in_channels": [64, 96, 128],
    "decoder_in_channels": [64, 64, 64],
    "num_denoising": 0,
}

FAMILIES: dict[str, dict[str, Callable[[], Built]]] = {
    "decoders": {
        "Llama": decoder("Llama"),
        "Llama, 32 layers": decoder("Llama", num_hidden_layers=32),
        "Qwen3": decoder("Qwen3", head_dim=8),
        "Gemma 2": decoder("Gemma2", head_dim=8),
        "Phi-3": decoder("Phi3"),
        "GPT-OSS": decoder("GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2),
        "GPT-2": of_transformers("GPT2LMHeadModel", WORDS, **GPT2),
        "GPT-NeoX": decoder("GPTNeoX"),
        "Falcon": decoder("Falcon", multi_query=False),
        "Falcon, one head of keys": decoder("Falcon", multi_query=True),
        "Falcon, groups of heads": decoder("Falcon", new_decoder_architecture=True, num_kv_heads=2),
        "GPTBigCode": decoder("GPTBigCode", multi_query=True),
        "Bloom": of_transformers("BloomForCausalLM", WORDS, **BLOOM),
        "MPT": of_transformers("MptForCausalLM", WORDS, **MPT),
        "RWKV": of_transformers("RwkvForCausalLM", WORDS, **RWKV),
        "XLNet": of_transformers("XLNetLMHeadModel", WORDS, **XLNET),
        "OLMo 2": decoder("Olmo2"),
        "OPT": decoder("OPT", ffn_dim=128, word_embed_proj_dim=64),
        "Mixtral": decoder("Mixtral", num_local_experts=4),
        "DeepSeek-V3": decoder("DeepseekV3", **{**LATENT, "num_key_value_heads": 8}),
        "Qwen3-Next": decoder("Qwen3Next", head_dim=8, **LINEAR),
        "Mamba": decoder("Mamba", state_size=8, use_cache=False),
        "Mamba-2": decoder("Mamba2", state_size=8, use_cache=False, **HEADS),
    },
    "encoders": {
        "BERT": of_transformers("BertForSequenceClassification", WORDS, **ENCODER),
        "DeBERTa": of_transformers(
            "DebertaV2ForSequenceClassification", WORDS, **ENCODER, **DEBERTA
        ),
    },
    "speech": {
        "Wav2Vec2": of_transformers("Wav2Vec2ForCTC", SOUND, **SPEECH),
        "HuBERT": of_transformers("HubertForCTC", SOUND, **SPEECH),
        "Conformer": of_transformers("Wav2Vec2ConformerForCTC", SOUND, **SPEECH),
        "WavLM": of_transformers("WavLMForCTC", SOUND, **SPEECH),
    },
    "encoder and decoder": {
        "T5": of_transformers("T5ForConditionalGeneration", PAIR, **T5),
        "BART": of_transformers("BartForConditionalGeneration", PAIR, **BOTH),
        "Whisper": of_transformers("WhisperForConditionalGeneration", MEL, **{**BOTH, **WHISPER}),
        "nn.Transformer": lambda: (Translation(), (WORDS, WORDS)),
    },
    "pictures": {
        "ViT": of_transformers("ViTForImageClassification", torch.randn(2, 3, 32, 32), **PICTURES),
        "CLIP's classifier": of_transformers(
            "CLIPForImageClassification", torch.randn(2, 3, 32, 32), vision_config=PICTURES
        ),
        "timm resnet26": of_timm("resnet26", 64),
        "timm nf_resnet26": of_timm("nf_resnet26", 64),
        "timm skresnet18": of_timm("skresnet18", 64),
        "timm cspdarknet53": of_timm("cspdarknet53", 64),
        "timm hrnet_w18_small": of_timm("hrnet_w18_small", 64),
        "timm levit_128s": of_timm("levit_128s", 224),
        "timm efficientformerv2_s0": of_timm("efficientformerv2_s0", 224),
        "timm mixer_s32": of_timm("mixer_s32_224", 64, img_size=64),
        "VideoMAE": of_transformers(
            "VideoMAEForVideoClassification", torch.randn(2, 4, 3, 32, 32), **PICTURES, num_frames=4
        ),
        "SegFormer": of_transformers(
            "SegformerForSemanticSegmentation", torch.randn(2, 3, 64, 64), **SEGFORMER
        ),
    },
    "detectors, by their parts": {
        "Faster R-CNN": detector("fasterrcnn_resnet50_fpn", **SCALE, **BOXES),
        "Mask R-CNN": detector("maskrcnn_resnet50_fpn", **SCALE, **BOXES),
        "Keypoint R-CNN": detector("keypointrcnn_resnet50_fpn", **SCALE, **BOXES),
        "RetinaNet": detector("retinanet_resnet50_fpn", **SCALE),
        "FCOS": detector("fcos_resnet50_fpn", **SCALE),
        "SSD": detector("ssd300_vgg16"),
        "SSDlite": detector("ssdlite320_mobilenet_v3_large"),
    },
    "detectors": {
        "DETR": lambda: transformer_detector("Detr", "ResNetConfig", STAGES[3:]),
        "Deformable DETR": lambda: transformer_detector(
            "DeformableDetr", "ResNetConfig", STAGES[1:], num_feature_levels=3
        ),
        "RT-DETR": lambda: transformer_detector("RTDetr", "RTDetrResNetConfig", STAGES[1:], **MAPS),
    },
    "optical flow": {"RAFT": built("torchvision.models.optical_flow", "raft_small", FRAMES)},
    "diffusion": {
        "Stable Diffusion's UNet": built("diffusers", "UNet2DConditionModel", NOISE, **UNET)
    },
    "sequences": {
        "LSTM": lambda: (Speech(nn.LSTM), torch.randn(2, 40, 32)),
        "GRU": lambda: (Speech(nn.GRU), torch.randn(2, 40, 32)),
        "LSTM with a projection": lambda: (Speech(nn.LSTM, proj_size=32), torch.randn(2, 40, 32)),
    },
    "adversarial": {"discriminator, spectral norm": discriminator},
    "graphs": {"messages along edges": lambda: (Messages(), GRAPH)},
}
