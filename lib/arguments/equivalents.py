"""Names of arguments in transformers, vLLM, SGLang and OpenAI's API, and their equivalents in weft.

Each table is passed to `weft.arguments.checks.names_arguments` for one function; its values become
the `instead` of an error.
"""

from collections.abc import Iterable


def _all(names: str, instead: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


# Names whose equivalents are arguments of `SamplingParams`.
_SAMPLING = {
    **_all("do_sample", "temperature=..."),
    **_all("min_length min_new_tokens", "min_tokens=..."),
    **_all("best_of num_return_sequences", "n=..."),
    **_all("stop_sequences stop_strings", "stop=[...]"),
    **_all("eos_token_id", "stop_token_ids=[...]"),
    **_all("bad_words_ids suppress_tokens", "bad_token_ids=[...]; bad_words=[...], of texts"),
    **_all("sequence_bias", "logit_bias={...}"),
    **_all("output_scores return_logprob top_logprobs top_logprobs_num", "logprobs=..."),
}

# Names without an equivalent, and names that weft does not need.
_NOWHERE = {
    **_all(
        "beam_width early_stopping length_penalty num_beams use_beam_search",
        "nothing like it: weft.SamplingParams(n=...) draws several completions",
    ),
    **_all(
        "epsilon_cutoff eta_cutoff typical_p",
        "nothing like it: temperature, top_k, top_p and min_p of weft.SamplingParams",
    ),
    **_all(
        "guidance_scale watermarking_config",
        "nothing like it: weft serves one model's own distribution",
    ),
    **_all("output_attentions", "nothing like it: attention is one kernel, which keeps no weights"),
    **_all(
        "attention_mask pad_token_id padding",
        "leave it out: prompts have any lengths, and none is padded",
    ),
    **_all(
        "cache_implementation past_key_values use_cache",
        "leave it out: keys and values are kept in pages",
    ),
    **_all(
        "return_dict_in_generate",
        "leave it out: a weft.Completion has text, token_ids and logprobs",
    ),
    **_all("tokenizer tokenizer_mode", "leave it out: weft.load reads the folder's tokenizer.json"),
    **_all("trust_remote_code", "leave it out: weft runs no code of a checkpoint"),
    **_all("data_parallel_size", "nothing like it: a process for each copy of the model"),
    **_all("tensor_parallel_size tp_size", "Engine(model, tensor=n), in a process for each rank"),
}

# Names whose equivalents are arguments of `generate` and `Engine` that say how they run.
_PLACE = {
    **_all("num_stages pipeline_parallel_size pp_size", "pipeline=..."),
    **_all("cudagraph_mode mode", "graph=..."),
    **_all("disable_cuda_graph enforce_eager", 'graph="none"'),
    **_all("compilation_config compile_config enable_torch_compile", 'compiler="inductor"'),
    **_all("device device_map", "weft.load(folder, device)"),
    **_all("dtype quantization torch_dtype", "weft.load(folder, dtype=...)"),
    **_all(
        "assistant_model draft_model num_assistant_tokens num_speculative_tokens"
        " prompt_lookup_num_tokens speculative_config",
        "speculation=weft.Speculation(...)",
    ),
}

_MASKS = (
    "constraints ebnf grammar guided_decoding guided_json guided_regex json_schema logits_processor"
    " logits_processors prefix_allowed_tokens_fn regex response_format structured_outputs"
)
_MASK = "mask=...): a function from the tokens said so far to those that may be next"


def _of_requests(sampling: str, field_names: Iterable[str]) -> dict[str, str]:
    """The names for a function that takes a prompt and `SamplingParams`.

    Args:
        sampling: how `SamplingParams` is passed to the function, with {} for its argument.
        field_names: the fields of `SamplingParams`.
    """
    return {
        **{name: sampling.format(f"{name}=...") for name in field_names},
        **{name: sampling.format(instead) for name, instead in _SAMPLING.items()},
        **_all("generation_config params sampling_params", sampling.format("...")),
        **_all("stop_regex stopping_criteria", sampling.format("stop=[...], stop_token_ids=[...]")),
        **_all("max_completion_tokens max_length max_new_tokens", "max_tokens=..."),
        **_all(
            "input_ids inputs prompt_token_ids",
            "the prompt as a list of token ids (of a tensor its .tolist())",
        ),
        **_all(
            "inputs_embeds prompt_embeds",
            "weft.EmbedsPrompt(token_ids, inputs_embeds) as the prompt",
        ),
        **_all("position_ids", "weft.EmbedsPrompt(token_ids, positions=...) as the prompt"),
        **_all(
            "output_hidden_states return_hidden_states",
            "weft.transforms.make_runner(model, limits): its stages are functions that return them",
        ),
        **_all(
            "output_logits",
            "weft.transforms.make_runner(model, limits, keep_logits=True), and steps by hand",
        ),
        **_NOWHERE,
    }


def for_generate(field_names: Iterable[str]) -> dict[str, str]:
    """The names for `generate`; `field_names` are the fields of `SamplingParams`."""
    return {
        **_PLACE,
        **_of_requests("sampling=weft.SamplingParams({})", field_names),
        **_all(_MASKS, f"weft.Engine(model).add(prompt, ..., {_MASK}"),
        **_all("adapters lora_path lora_request", "adapter=weft.load_adapter(model, folder)"),
        **_all("streamer", "stream=True"),
        **_all("tqdm use_tqdm", "progress=True"),
        **_all(
            "max_model_len max_num_batched_tokens max_num_seqs",
            "weft.Engine(model, weft.EngineLimits(...))",
        ),
    }


def for_add(field_names: Iterable[str]) -> dict[str, str]:
    """The names for `Engine.add` and `Engine.stream`; `field_names` are the fields of
    `SamplingParams`."""
    return {
        **_of_requests("weft.SamplingParams({}), after the prompt", field_names),
        **_all(_MASKS, f"engine.add(prompt, ..., {_MASK}"),
        **_all(
            "lora lora_path lora_request",
            "adapter=..., the name of one of Engine(..., adapters={...})",
        ),
        **_all("request_id", "id=..."),
        **_all(
            "speculation speculative_config",
            "weft.Engine(model, speculation=weft.Speculation(...))",
        ),
        **_all("stream streamer", "engine.stream(prompt, ...)"),
    }


# The names for `SamplingParams`.
SAMPLING = {
    **_SAMPLING,
    **_NOWHERE,
    **_all(
        "max_completion_tokens max_length max_new_tokens max_tokens",
        "generate(..., max_tokens=...), or engine.add(..., max_tokens=...)",
    ),
    **_all("stop_regex stopping_criteria", "stop=[...], stop_token_ids=[...]"),
    **_all(_MASKS, f"engine.add(prompt, ..., {_MASK}"),
}

# The names for `EngineLimits`.
LIMITS = {
    **_all("max_num_seqs max_running_requests", "max_num_reqs=..."),
    **_all("chunked_prefill_size max_num_batched_tokens", "max_num_tokens=..."),
    **_all("context_length", "max_model_len=..."),
    **_all("block_size", "page_size=..."),
    **_all(
        "gpu_memory_utilization max_total_tokens mem_fraction_static num_gpu_blocks",
        "num_pages=...",
    ),
}

# The names for `Engine`.
ENGINE = {
    **_PLACE,
    **_NOWHERE,
    **{name: f"limits=weft.EngineLimits({instead})" for name, instead in LIMITS.items()},
    **{
        name: f"limits=weft.EngineLimits({name}=...)"
        for name in ("max_num_reqs", "max_num_tokens", "max_model_len")
    },
    **_all(
        "enable_lora lora_modules lora_paths loras",
        "adapters={name: weft.load_adapter(model, folder)}",
    ),
    **_all("async_scheduling disable_overlap_schedule", "run_ahead=..."),
    **_all("enable_chunked_prefill", "leave it out: prompts are always read in chunks"),
    **_all("disable_radix_cache enable_prefix_caching", "prefix_caching=False, or True"),
}

# The names for `Model.with_stages`.
STAGES = {
    **_all("attn self_attn", "attention=..., or attend=... for attention between its projections"),
    **_all("ffn mlp", "feed_forward=..."),
    **_all("layernorm rms_norm", "norm=..."),
    **_all("head lm_head", "logits=..."),
    **_all("layer", "layers={index: f}"),
    **_all("hooks register_forward_hook", "layers={index: f}, or captures={name: example}"),
}

# The names for `load`.
LOAD = {
    **_NOWHERE,
    **_all("enable_expert_parallel ep_size", 'experts="whole", with shard=(index, num_ranks)'),
    **_all("torch_dtype", "dtype=..."),
    **_all("device_map", "device=...; weft.generate(..., pipeline=N) spans devices"),
    **_all(
        "pipeline pp_size",
        "stage=(index, num_stages), for a rank of a pipeline; or weft.generate(..., pipeline=N)",
    ),
    **_all("model model_name pretrained_model_name_or_path", "path=..., a folder or a .gguf"),
    **_all("gguf_file", "path=..., the .gguf itself"),
    **_all(
        "cache_dir force_download local_files_only revision subfolder token",
        "a folder with the files: weft downloads nothing",
    ),
    **_all(
        "load_in_4bit load_in_8bit quantization quantization_config",
        "leave it out: linear layers are in FP8 where the checkpoint has them so",
    ),
    **_all(
        "attn_implementation",
        "leave it out: weft has one attention for each device (`weft doctor` names it)",
    ),
    **_all("low_cpu_mem_usage use_safetensors", "leave it out: weights are read one by one"),
    **_all(
        "max_memory offload_folder",
        "nothing like it: weights stay on one device; pipeline=... splits the layers",
    ),
    **_all("load_format", "weft bench --load-format dummy, for random weights"),
    **_all("config", "leave it out: weft reads the checkpoint's own"),
}
