"""Model types that transformers has and no family here computes, by the part that they need."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BY_PART = {
    "latent attention": (
        "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite "
        "glm5_next glm_moe_dsa hy_v4 kimi_k25 kimi_linear longcat_flash minicpm3 mistral4 mistral_large4 youtu"
    ),
    "attention to an index of chosen tokens": "deepseek_v4 minimax_m3_vl minimax_m3_vl_text qwen4_exp qwen4_exp_text",
    "attention in chunks": "llama4 llama4_text",
    "differential attention": "diffllama",
    "attention with a mask of its own for each head": "doge",
    "attention whose values are smaller than its keys": "mimo_v2_flash",
    "attention among experts": "jetmoe",
    "attention gates by softplus, or one for each head": "laguna step3p7",
    "attention gates with biases, and residuals scaled by depth": "beam",
    "norms of queries and keys after they rotate": "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl nanochat",
    "layers that are run several times": "hrm_text",
    "state-space layers": (
        "bamba falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemotron_h nemotron_h_omni zamba zamba2"
    ),
    "recurrent layers of another kind": (
        "inkling2 inkling2_text inkling_mm_model inkling_text lfm3 lfm3_vl minimax olmo_hybrid recurrent_gemma rwkv "
        "xlstm zaya"
    ),
    "a feed-forward without a gate": "apertus arcee cosmos3_edge jais2 nemotron phi starcoder2",
    "norms inside the feed-forward, and ternary weights": "bitnet",
    "LayerNorms with biases, or without weights": "dbrx olmo phimoe stablelm",
    "predicted activations, and sums over several residual streams": "gemma3n gemma3n_text",
    "experts routed by corrected logits": "kolibri1",
    "a mean of shared and routed experts": "cohere2_moe",
    "experts in tensors of another layout": "aria aria_text",
    "experts for images beside those for text": "ernie4_5_vl_moe",
    "a rope that is scaled in some layers": "molmo2",
    "queries scaled after norms without weights": "muse_glimmer muse_spark",
    "a decoder of bytes": "blt",
    "attention to all of the prompt at once": "diffusion_gemma paligemma",
    "learned positions, or a decoder like GPT-2's": (
        "biogpt bloom codegen cpmant ctrl falcon gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj "
        "modernbert-decoder mpt openai-gpt opt persimmon fuyu xglm blip-2 instructblip instructblipvideo kosmos-2 "
        "kosmos-2.5"
    ),
    "an encoder": (
        "bart bigbird_pegasus blenderbot blenderbot-small blip florence2 marian mbart mvp pegasus pix2struct plbart "
        "pp_formulanet prophetnet t5gemma2 trocr udop vision-encoder-decoder whisper"
    ),
    "a decoder like BERT's": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie git megatron-bert reformer rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
    ),
    "layers that attend to images or sound": (
        "evolla gemma4_assistant gemma4_unified_assistant idefics mllama moshi musicgen musicgen_melody "
        "phi4_multimodal pi0"
    ),
    "tokens of images": "chameleon emu3",
    "a reader of the text part of a model that reads pages": (
        "deepseek_ocr2 glm_ocr got_ocr2 granite_docling lighton_ocr minicpm_ocr paddleocr_vl pp_chart2table "
        "qianfan_ocr unlimited_ocr"
    ),
    "a reader of the text part of a model that hears": (
        "moss_transcribe_diarize qwen2_5_omni_thinker qwen3_omni_moe_thinker"
    ),
    "a reader of the text part of a model that sees video": (
        "cosmos3_omni fast_vlm llava_next_video llava_onevision video_llama_3 video_llava"
    ),
    "a reader of its text part": (
        "aya_vision cohere2_vision cohere_compass cohere_compass_text deepseek_vl deepseek_vl_hybrid exaone4_5 glm46v "
        "glm4v glm4v_moe glmga granite4_vision hyperclovax_vision_v2 idefics2 idefics3 internvl janus lfm2_vl llava "
        "llava_next minicpmv4_6 minicpmv4_7 ovis2 perception_lm shieldgemma2 smolvlm vipllava"
    ),
}
UNSERVED: Mapping[str, str] = MappingProxyType(
    {name: part for part, names in _BY_PART.items() for name in names.split()}
)
