"""Makes the target model of `fledge demo`: a tokenizer and a small chat model, trained on one GPU in a few minutes.

    python tools/make_assistant.py --data DIR --out fledge/demo/target

DIR has the conversations that tools/assistant_chats.py reads. The model is a Llama of 24 narrow layers, beside which a
draft of one layer costs little. The model learns from conversations alone, in the chat template, and to end its turns.
More than some five passes over the conversations overfit: the loss of held-out conversations rises again.

Then the model unlearns to loop: it answers prompts greedily, and tokens that repeat what an answer has said before
become less likely (Welleck et al. 2020, "Neural Text Generation With Unlikelihood Training", equation 6).

At last the logits are doubled, through the gain of the last norm. Sampled at temperature 1, a model that has only been
pre-trained says many an unlikely word, where chat models that people serve were made surer by further training.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from assistant_chats import Chat, beginning, conversations
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SYSTEM = "You are Fledgling, a small assistant that books, finds, tells short stories and works small sums."
TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}{{- '<|im_start|>system\\n" + SYSTEM + "<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# words, single digits, other characters, line ends, spaces: numbers are read digit by digit, as sums need them
PIECES = r" ?[\p{L}]+|'\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
VOCABULARY = 6144
CONTEXT = 1024  # tokens of a training row
WEIGHTS = {"system": 0, "user": 30, "assistant": 100}  # of the loss of what each role says, in percent
WARM_UP = 0.03  # share of the steps
SHARPNESS = 2.0  # factor of the logits after training
LOOP = 6  # tokens: as many in a row that an answer has said before are a loop
LOOP_ROUNDS, LOOP_PROMPTS, LOOP_BATCH, LOOP_TOKENS = 5, 512, 64, 160  # prompts are of each kind
LOOP_WEIGHT, LOOP_LR = 5.0, 2e-4  # of the loss of repeated tokens beside that of conversations; learning rate
REPORTS = 20  # points of the loss curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the conversations")
    parser.add_argument("--out", type=Path, default=Path("fledge/demo/target"), help="directory of the model")
    parser.add_argument("--epochs", type=float, default=5, help="passes over the conversations (default: 5)")
    parser.add_argument("--rows", type=int, default=32, help=f"batch size, in rows of {CONTEXT} tokens (default: 32)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate after warm-up (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seen, held_out = conversations(options.data, options.seed)
    tokenizer = make_tokenizer(chat for chats in seen.values() for chat in chats)
    rows = encoded_rows(tokenizer, seen).to(device)
    measured = {kind: encoded_rows(tokenizer, {kind: chats}).to(device) for kind, chats in held_out.items()}
    print(json.dumps({"rows": len(rows), "tokens": rows[..., 0].numel()}), flush=True)
    model = LlamaForCausalLM(model_config()).to(device)
    figures = pretrain(model, rows, measured, options)
    figures["repeated_tokens"] = unlearn_loops(model, tokenizer, seen, rows, options)
    with torch.no_grad():
        model.model.norm.weight *= SHARPNESS
    model.to(torch.bfloat16)
    figures["held_out_loss"] = {kind: mean_loss(model, of_kind) for kind, of_kind in measured.items()}
    figures["sharpness"] = SHARPNESS
    figures["parameters"] = model.num_parameters()
    print(json.dumps(figures), flush=True)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    (options.out / "pretrain.json").write_text(json.dumps(figures, indent=1) + "\n")


def make_tokenizer(chats: Iterable[Chat]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that was trained on the conversations, with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, START, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator((m["content"] for chat in chats for m in chat), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=2048, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def encoded_rows(tokenizer: PreTrainedTokenizerFast, chats: dict[str, list[Chat]]) -> torch.Tensor:
    """Rows of CONTEXT tokens [R, CONTEXT, 2]: ids, and the weight of each id's loss in percent, both int16."""
    flat = [chat for of_kind in chats.values() for chat in of_kind]
    random.shuffle(flat)
    backend = tokenizer.backend_tokenizer
    said = iter([e.ids for e in backend.encode_batch_fast([m["content"] for chat in flat for m in chat])])
    headers = {role: backend.encode(f"{role}\n").ids for role in WEIGHTS}
    start, end, (line,) = *tokenizer.convert_tokens_to_ids([START, END]), backend.encode("\n").ids
    system = backend.encode(SYSTEM).ids
    ids: list[int] = []
    weights: list[int] = []
    for chat in flat:
        for role, content in [("system", system), *((m["role"], next(said)) for m in chat)]:
            header = [start, *headers[role]]
            ids += [*header, *content, end, line]
            weights += [0] * len(header) + [WEIGHTS[role]] * (len(content) + 1) + [0]
    rows = len(ids) // CONTEXT
    both = np.array([ids[: rows * CONTEXT], weights[: rows * CONTEXT]], dtype=np.int16)
    return torch.from_numpy(both.reshape(2, rows, CONTEXT)).permute(1, 2, 0).contiguous()


def model_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=672, max_position_embeddings=2048, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def causal_attention(module, query, key, value, attention_mask, scaling=None, **_) -> tuple[torch.Tensor, None]:
    """Causal attention by the flash kernel. The attention "sdpa" of transformers builds a mask when it is compiled."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("causal", causal_attention)


def pretrain(
    model: LlamaForCausalLM, rows: torch.Tensor, measured: dict[str, torch.Tensor], options: argparse.Namespace
) -> dict:
    """Trains the model and returns figures of the run. Losses are in nats per token of what the assistant says."""
    model.set_attn_implementation("causal")
    if rows.is_cuda:
        for layer in model.model.layers:  # one compilation serves all layers
            layer.compile()
    steps = max(1, int(options.epochs * len(rows) / options.rows))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=rows.is_cuda)
    batches, curve, start = endless(rows, options.rows), [], time.perf_counter()
    for step in range(steps):
        share = step / steps
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min((share + 1 / steps) / WARM_UP, (1 - share) / (1 - WARM_UP))
        loss = loss_of(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step * REPORTS // steps != (step + 1) * REPORTS // steps:
            point = {"step": step + 1, "seconds": time.perf_counter() - start, "loss": loss.item()}
            if len(curve) % 4 == 3:
                point["held_out"] = {kind: mean_loss(model, of_kind) for kind, of_kind in measured.items()}
            curve.append(point)
            print(json.dumps(point), flush=True)
    seconds = time.perf_counter() - start
    for layer in model.model.layers:
        layer._compiled_call_impl = None  # inputs of many lengths follow
    model.set_attn_implementation("sdpa")
    return {"steps": steps, "tokens": steps * options.rows * CONTEXT, "seconds": seconds, "curve": curve}


def unlearn_loops(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seen: dict[str, list[Chat]], rows: torch.Tensor,
    options: argparse.Namespace,
) -> list[float]:  # fmt: skip
    """Makes the tokens of loops less likely, while the model goes on learning from conversations. Returns the share of
    such tokens in the greedy answers of each round."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LOOP_LR, betas=(0.9, 0.95), weight_decay=0.0)
    batches, shares = endless(rows, options.rows), []
    for _ in range(LOOP_ROUNDS):
        chats = [chat for kind in ("bookings", "stories") for chat in random.sample(seen[kind], LOOP_PROMPTS)]
        ids, loops = greedy_answers(model, tokenizer, [beginning(chat, random) for chat in chats])
        shares.append(float(loops.sum() / (ids != tokenizer.pad_token_id).sum()))
        print(json.dumps({"repeated_tokens": shares[-1]}), flush=True)
        for chosen in torch.randperm(len(ids), device=ids.device).split(LOOP_BATCH):
            with torch.autocast(ids.device.type, torch.bfloat16):
                logits = model(input_ids=ids[chosen], use_cache=False).logits[:, :-1]
            log_p = -F.cross_entropy(logits.flatten(0, 1).float(), ids[chosen, 1:].flatten(), reduction="none")
            unlikely = -torch.log1p(-log_p.exp().clamp(max=0.999)) * loops[chosen, 1:].flatten()
            loss = loss_of(model, next(batches))
            loss = loss + LOOP_WEIGHT * unlikely.sum() / (ids[chosen] != tokenizer.pad_token_id).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
    return shares


def greedy_answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[Chat]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with their answers, and which of the tokens end LOOP tokens that the answer has said before, both [N, T].
    They are padded at the end."""
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in prompts]
    given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    given = given.to(model.device)
    start = given["input_ids"].shape[1]
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        ids = model.generate(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"], do_sample=False,
            max_new_tokens=LOOP_TOKENS, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    loops = torch.zeros_like(ids, dtype=torch.bool)
    for row, answer in enumerate(ids[:, start:].tolist()):
        said = set()
        for end in range(LOOP, len(answer) + 1):
            last = tuple(answer[end - LOOP : end])
            loops[row, start + end - 1] = last in said and last[-1] != tokenizer.pad_token_id
            said.add(last)
    padding = start - given["attention_mask"].sum(1, keepdim=True)  # before each prompt; it moves to the end
    order = (torch.arange(ids.shape[1], device=ids.device) + padding) % ids.shape[1]
    return ids.gather(1, order), loops.gather(1, order)


def endless(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Batches of rows, in a new order in each pass."""
    while True:
        for chosen in torch.randperm(len(rows), device=rows.device).split(size):
            if len(chosen) == min(size, len(rows)):
                yield rows[chosen]


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """The weighted mean loss of the next tokens, in nats per token."""
    ids, weights = rows[..., 0].long(), rows[:, 1:, 1].flatten() / 100
    with torch.autocast(rows.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """The mean loss of what the assistant says."""
    said = rows.clone()
    said[..., 1] = 100 * (said[..., 1] == 100)
    return sum(float(loss_of(model, part)) * len(part) for part in said.split(16)) / len(rows)


if __name__ == "__main__":
    main()
