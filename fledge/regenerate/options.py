"""The options of `fledge regenerate`."""

from __future__ import annotations

from dataclasses import dataclass

from fledge.options import (
    MAX_SEED,
    NO_EFFECT_IF_GREEDY,
    SERVER_OPTIONS,
    Options,
    api_key_env_option,
    columns_option,
    dtype_option,
    model_option,
    opt,
    request_timeout_option,
    trust_remote_code_option,
)


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(Options):
    """Answer the prompts of the data with the target, to train a draft on the target's own text."""

    target: str | None = opt(
        "target model: a directory or hub id; with --endpoint only its tokenizer is read, to check the texts", None
    )
    trust_remote_code: bool = trust_remote_code_option()
    draft: str | None = opt(
        "draft of the target, a directory or hub id, to generate the same text faster (default: none)", None
    )
    endpoint: str | None = opt(
        "address of an OpenAI-compatible server (vLLM, SGLang, ..) that answers, e.g. http://localhost:8000", None
    )
    model: str | None = model_option()
    api_key_env: str = api_key_env_option()
    concurrency: int = opt("number of requests that the server works on at any time", 64, minimum=1, maximum=4096)
    request_timeout: float = request_timeout_option()
    skip_bad: bool = opt("skip records that fledge, the chat template or the server refuses, and count them", False)
    data: list[str] = opt(
        "files, globs or hub ids with the prompts to answer, or sharegpt, ultrachat, perfectblend, magpie, openhermes, "
        "nemotron; repeatable", repeatable=True
    )  # fmt: skip
    columns: str | None = columns_option()
    out: str = opt("JSON lines file to write; an unfinished file is continued")
    max_new_tokens: int | None = opt(
        "maximum tokens per answer (default: 512, at most half of the target's context)", None, minimum=1
    )
    prompt_tokens: int = opt("tokens of a plain text that are kept as its prompt", 64, minimum=1)
    temperature: float = opt("sampling temperature; 0 decodes greedily", 0.0, minimum=0)
    top_p: float = opt(
        "sample from the most likely tokens whose probabilities sum to this value", 1.0, greater_than=0, maximum=1
    )
    top_k: int = opt("sample from the k most likely tokens; 0 keeps all; with --endpoint", 0, minimum=0)
    batch: int | None = opt("records answered together (default: 16, or 1 if the target cannot batch)", None, minimum=1)
    limit: int | None = opt("maximum number of records (default: all)", None, minimum=1)
    template_kwargs: str | None = opt("JSON object of chat template variables", None)
    seed: int = opt(
        "random seed of sampling (with --endpoint only if it is given) and of the shares (@0.5) of --data", 0,
        minimum=0, maximum=MAX_SEED,
    )  # fmt: skip
    device: str = opt("device: auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = dtype_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            self.refuse(["top_p", "top_k"], NO_EFFECT_IF_GREEDY)
        if self.endpoint is None:
            self.refuse((*SERVER_OPTIONS, "concurrency", "top_k"), "without --endpoint; give it, or")
        else:
            self.refuse(("draft", "batch", "device", "dtype"), "with --endpoint, whose server decodes;")
            if self.trust_remote_code and not self.target:
                raise ValueError("--trust-remote-code has no effect without --target; give it, or leave the flag out")
