"""`fledge regenerate`: the target answers the data's prompts itself; a draft trained on its words fits it better."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.jobs.options import dtype_named, opt, template_kwargs

if TYPE_CHECKING:
    from fledge.data.read import Record
    from fledge.data.template import ChatTemplate
    from fledge.models.target import Target


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions:
    """Have the target answer the data's prompts itself, for training on its own words."""

    target: str = opt("the model that answers: a directory or hub id")
    data: list[str] = opt("files, globs or hub ids whose prompts are answered; repeatable", many=True)
    out: str = opt("JSON lines to write; an unfinished file is gone on with")
    max_new_tokens: int = opt("most tokens of an answer", 512)
    prompt_tokens: int = opt("tokens of a plain text that are kept as its prompt", 64)
    temperature: float = opt("0 is greedy", 0.0)
    top_p: float = opt("sample among the likeliest that hold this mass", 1.0)
    batch: int = opt("records answered together", 32)
    limit: int | None = opt("at most this many records", None)
    template_kwargs: str | None = opt("JSON passed to the chat template", None)
    seed: int = opt("of sampling", 0)
    device: str = opt("auto, cpu, cuda, cuda:1, ...", "auto")
    dtype: str | None = opt("compute dtype (default: float32 on the CPU, else the target's)", None)


def run(options: RegenerateOptions, say: Callable[[str], None], progress: Any) -> None:
    """Writes one line a record, in order; killed at any moment, the same command goes on after the last whole batch."""
    import torch

    from fledge.data.read import read_records
    from fledge.data.template import ChatTemplate
    from fledge.decode.engine import resolve_device
    from fledge.models.target import load_target

    if not options.data:
        raise ValueError("give --data FILE")
    records = read_records(options.data, options.seed)[: options.limit]
    out = Path(options.out)
    done = _finished(out, records)
    if done == len(records):
        say(f"{out} is complete: {done:,} records")
        return
    if done:
        say(f"going on with {out} after {done:,} of {len(records):,} records")
    target = load_target(options.target, device=resolve_device(options.device), dtype=dtype_named(options.dtype))
    template = ChatTemplate(target.tokenizer, target.stop_ids, template_kwargs(options.template_kwargs))
    cut = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as f, progress.counting("answering", len(records), done) as advance:
        for start in range(done, len(records), options.batch):
            torch.manual_seed(options.seed + start)  # a resumed run samples as an unbroken one does
            batch = records[start : start + options.batch]
            rows, unfinished = _answer(batch, target, template, options)
            cut += unfinished
            f.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            f.flush()
            for _ in batch:
                advance()
    say(f"wrote {len(records):,} records to {out}")
    if cut:
        say(f"{cut:,} answers reached --max-new-tokens {options.max_new_tokens}; they are kept as far as they go")


def _finished(out: Path, records: list[Record]) -> int:
    """Whole lines already there; a torn last line is cut off. Raises ValueError where they answer other records."""
    if not out.exists():
        return 0
    text = out.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) != len(text):
        out.write_bytes(whole)
    lines = whole.splitlines()
    if len(lines) > len(records) or (lines and json.loads(lines[0]).get("source") != records[0].where):
        raise ValueError(f"{out} answers other records than --data holds; choose another --out")
    return len(lines)


def _answer(
    batch: list[Record], target: Target, template: ChatTemplate, options: RegenerateOptions
) -> tuple[list[dict[str, Any]], int]:
    """Answers every assistant turn anew, each behind the target's own earlier answers. Returns rows, answers cut."""
    told: list[list[dict[str, Any]]] = [[] for _ in batch]
    rows: list[dict[str, Any]] = [{"source": r.where} for r in batch]
    cut = 0
    prompts = {i: template.prompt_ids(r.text)[: options.prompt_tokens] for i, r in enumerate(batch) if r.text}
    for i, (text, unfinished) in zip(prompts, _generate(list(prompts.values()), target, options), strict=True):
        rows[i]["text"] = target.tokenizer.decode(prompts[i], skip_special_tokens=True) + text
        cut += unfinished
    waiting = {i: list(r.messages) for i, r in enumerate(batch) if r.messages}
    while waiting:
        for i in list(waiting):
            while waiting[i] and waiting[i][0]["role"] != "assistant":
                told[i].append(waiting[i].pop(0))
            if not waiting[i]:
                del waiting[i]
        asked = list(waiting)
        ids = [template.prompt_ids(told[i], tools=batch[i].tools, where=batch[i].where) for i in asked]
        for i, (text, unfinished) in zip(asked, _generate(ids, target, options), strict=True):
            told[i].append({"role": "assistant", "content": text})
            waiting[i].pop(0)
            cut += unfinished
    for i, record in enumerate(batch):
        if record.messages:
            rows[i]["messages"] = _without_open_end(told[i])
            rows[i] |= {"tools": record.tools} if record.tools else {}
    return rows, cut


def _without_open_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drops user turns after the last answer: nobody answers them."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    return messages[: last + 1]


def _generate(prompts: list[list[int]], target: Target, options: RegenerateOptions) -> list[tuple[str, bool]]:
    """Texts of a left-padded batch, and whether each was cut by the limit. Uses transformers' own generate."""
    import torch

    from fledge.models.kv_cache import TargetCache

    if not prompts:
        return []
    limit = target.context - options.max_new_tokens
    if max(map(len, prompts)) > limit:
        raise ValueError(
            f"a prompt of {max(map(len, prompts))} tokens leaves no room for --max-new-tokens in the target"
        )
    width = max(map(len, prompts))
    pad = target.tokenizer.pad_token_id if target.tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    sampling = dict(do_sample=True, temperature=options.temperature, top_p=options.top_p, top_k=0)
    greedy = dict(do_sample=False, temperature=None, top_p=None, top_k=None)
    out = target.model.generate(
        ids, attention_mask=mask, max_new_tokens=options.max_new_tokens, pad_token_id=pad,
        past_key_values=TargetCache(),  # grows in place, where transformers' own copies itself every step

        eos_token_id=sorted(target.stop_ids) or None, **(sampling if options.temperature > 0 else greedy),
    )[:, width:].tolist()  # fmt: skip
    texts = []
    for tokens in out:
        end = next((j for j, t in enumerate(tokens) if t in target.stop_ids), None)
        text = target.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        texts.append((text, end is None))
    return texts
