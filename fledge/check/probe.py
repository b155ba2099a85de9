"""The probe of a draft: inputs and outputs of the draft from the time of training, stored in the draft's directory.

`fledge train` writes the probe. `fledge check` computes the probe again, which shows whether target or draft have
changed. The files are in a subfolder that vLLM, SGLang, SafeAILab's code and transformers ignore.

    T tokens of the window    S slots    K steps    J draft ids with stored logits    R spacings of positions
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fledge.config import DraftConfig
from fledge.data.documents import Document
from fledge.drafts.draft import Draft
from fledge.drafts.weights import build_draft, config_json
from fledge.io.formats import config_from_hf
from fledge.measure.metrics import committed_per_round
from fledge.measure.prompts import quiet_traces
from fledge.targets.interface import DecodingTarget
from fledge.train.row_pass import Objective, row_pass
from fledge.types import Features, Packed

FOLDER = "fledge"
TENSORS, RECORD = f"{FOLDER}/probe.safetensors", f"{FOLDER}/record.json"
FORMAT = 1
SLOTS = 16  # slots whose logits are stored
STEPS = 5  # most drafted steps from each slot
CONTEXT = 256  # most tokens of the document, from its start on
BEFORE = 4  # tokens of the window before the first supervised token
IDS = 32  # draft ids whose logits are stored, evenly spaced over the draft's vocabulary
FAR = 4096  # most positions over which the slots are spread to test RoPE at long distances
CHAT = (
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another one."},
)


@dataclass(frozen=True)
class Excerpt:
    """The start of a training document, int64 [N], and the target's hidden states that a draft reads at the last T
    tokens of the start, bfloat16 [T, A, D]. `steps` is the number K of drafted steps."""

    token_N: Tensor
    states_TAD: Tensor
    steps: int

    @property
    def start(self) -> int:
        """The position of the first token with hidden states."""
        return self.token_N.numel() - self.states_TAD.shape[0]

    @property
    def slots(self) -> int:
        """The number S of slots from which all K steps can be drafted within the excerpt."""
        return self.states_TAD.shape[0] - 1 - self.steps


@dataclass(frozen=True)
class ProbeDecoding:
    """Greedy decoding of some prompts (token ids) with the draft in chains of `depth`: the committed tokens and the
    rounds of each answer of at most `new_tokens`, and the dtype of the target."""

    prompts: list[list[int]]
    new_tokens: int
    depth: int
    committed: list[int]
    rounds: list[int]
    dtype: str

    @property
    def tau(self) -> float:
        """The tokens committed per round; 0 if there were no rounds."""
        return sum(self.committed) / sum(self.rounds) if any(self.rounds) else 0.0


@dataclass(frozen=True)
class ProbeRecord:
    """The facts about a draft that are recorded when the draft is written.

    `config` is the draft's config.json, `tensors` the `tensor_sha256` of the weights by the names of `Draft`'s state
    dict. `layers` are the target's layers that the draft reads, numbered as in `TrainingTarget.features` (EAGLE-1:
    none). `precision` is the precision of the training features. `chats` are texts rendered by the target's template
    (`render_chats`). `spacings` are the distances between the positions of neighbouring slots in `replay`. `decoding`
    is None if the target could not decode. `step` is the step of training and `eval_tau` the τ measured at `step`.
    """

    layers: list[int]
    precision: str
    steps: int
    spacings: list[int]
    target_sha256: str
    chats: list[str]
    step: int = 0
    eval_tau: float | None = None
    decoding: ProbeDecoding | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def draft_config(self) -> DraftConfig:
        return config_from_hf(self.config)


@dataclass(frozen=True)
class Probe:
    """An excerpt, the draft's logits on the excerpt, and the record.

    `id_U` are the distinct tokens that the draft reads in the excerpt, ascending, and `embedding_UE` the embeddings of
    `id_U`. `id_J` are ids of the draft's vocabulary, and `logits_RKSJ` the logits of `id_J` that `replay` returned.
    `head_JE` are the rows of the target's head for `id_J`; None unless the draft uses the target's head (EAGLE-1).
    """

    excerpt: Excerpt
    id_U: Tensor
    embedding_UE: Tensor
    id_J: Tensor
    head_JE: Tensor | None
    logits_RKSJ: Tensor
    record: ProbeRecord


def excerpt_range(document: Document) -> tuple[int, int, int]:
    """Returns `start, end, steps`: the excerpt has the document's tokens [start, end) and is replayed for `steps`
    steps. The document has at least 3 tokens. The excerpt begins shortly before the first supervised token, if possible
    within CONTEXT and the document."""
    n = len(document.tokens)
    K = min(STEPS, n - 2)
    T = min(SLOTS + 1 + K, n)  # the slots, and the tokens that the steps read and predict
    start = max(0, min(first_supervised(document) - BEFORE, n - T, CONTEXT - T))
    return start, start + T, K


def first_supervised(document: Document) -> int:
    """The index of the first supervised token; 0 without a supervised token."""
    return int((document.spans >= 0).argmax())


def spacings(excerpt: Excerpt, max_length: int) -> list[int]:
    """The distances between neighbouring positions in `replay`: 1, and the distance that spreads the window over the
    trained length, to test RoPE's low frequencies."""
    return sorted({1, max(1, min(max_length, FAR) // excerpt.states_TAD.shape[0])})


def render_chats(template: Any) -> list[str]:
    """A question and a chat of three messages, rendered as prompts by a `ChatTemplate`. Empty if the tokenizer has no
    chat template; leaves out a chat that the template refuses."""
    rendered = []
    for messages in (CHAT[:1], CHAT) if template.tokenizer.chat_template is not None else ():
        try:
            rendered.append(template.render(messages, prompt=True))
        except ValueError:
            continue
    return rendered


def tensor_sha256(tensor: Tensor) -> str:
    """A hash of a tensor's values as float32 (or int64): a lossless change of dtype keeps the hash."""
    wide = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else torch.int64).contiguous()
    return hashlib.sha256(wide.numpy()).hexdigest()


def rounded_copy(draft: Draft, dtype: torch.dtype) -> Draft:
    """A copy of the draft on the CPU in float32, with values rounded to `dtype`, as after saving and loading."""
    tensors = {name: x.detach().cpu() for name, x in draft.state_dict().items()}
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    return build_draft(draft.config, tensors)


def probe_files(draft: Draft, dtype: torch.dtype, excerpt: Excerpt, record: ProbeRecord) -> dict[str, bytes]:
    """The files of a draft's probe, by path in the draft's directory. `draft` is connected to its target and is saved
    in `dtype`. The function sets the config, the tensors and the versions of `record`."""
    copy, config = rounded_copy(draft, dtype), draft.config
    id_U = read_ids(excerpt, config)
    id_J = torch.linspace(0, config.draft_vocab_size - 1, min(IDS, config.draft_vocab_size)).round().long()
    rows = {"embedding": draft.embedding[id_U.to(draft.embedding.device)].detach().to("cpu", dtype)}
    if config.family.borrows_head:
        rows["head"] = draft.head[id_J.to(draft.head.device)].detach().to("cpu", dtype)
    record = replace(
        record,
        config=config_json(draft, dtype),
        tensors={name: tensor_sha256(x) for name, x in copy.state_dict().items()},
        versions=_versions(),
    )
    probe = Probe(excerpt, id_U, rows["embedding"], id_J, rows.get("head"), torch.empty(0), record)
    tensors = {
        "tokens": excerpt.token_N.to(torch.int32), "states": excerpt.states_TAD.contiguous(),
        "draft_ids": id_J.to(torch.int32), "logits": replay(copy, probe), **rows,
    }  # fmt: skip
    text = json.dumps({"format": FORMAT, **asdict(record)}, indent=1, allow_nan=False)
    return {TENSORS: save(tensors), RECORD: (text + "\n").encode()}


def read_ids(excerpt: Excerpt, config: DraftConfig) -> Tensor:
    """The distinct tokens that a draft reads, ascending."""
    mask = [] if config.mask_token_id is None else [torch.tensor([config.mask_token_id])]
    return torch.cat([excerpt.token_N[excerpt.start :], *mask]).unique()


def _versions() -> dict[str, str]:
    import safetensors
    import transformers

    from fledge import __version__

    known = {"fledge": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return known | {"transformers": transformers.__version__, "safetensors": safetensors.__version__}


@torch.no_grad()
def replay(draft: Draft, probe: Probe) -> Tensor:
    """The draft's logits after each of K steps from each of S slots, float32 [R, K, S, J + 1]: the logits of the
    probe's J draft ids, followed by the logsumexp of all logits (EAGLE-1: of the J logits).

    The slots read the probe's hidden states, as a document of its own, and at each step the excerpt's next token, as in
    training (`row_pass`), once for each of R spacings of positions. `draft` is in float32 on the CPU; the probe's
    embeddings and head replace the draft's shared weights. Raises ValueError if the probe has no embedding of the
    draft's mask token.
    """
    excerpt, config, J = probe.excerpt, draft.config, probe.id_J
    T = excerpt.states_TAD.shape[0]
    token_T = excerpt.token_N[excerpt.start :]
    head = None if probe.head_JE is None else probe.head_JE.float()
    if draft.embed_tokens is None:  # ids become rows of the stored embeddings
        token_T = torch.searchsorted(probe.id_U, token_T)
        if config.mask_token_id is not None:
            draft.config = replace(config, mask_token_id=_row_of(config.mask_token_id, probe.id_U))
    draft.share_target_weights(probe.embedding_UE.float(), head)
    if draft.family.borrows_head:
        J = torch.arange(J.numel())  # the rows of the stored part of the head
    states = excerpt.states_TAD.float()
    features, objective = Features(states, states[:, -1]), Objective(depth=excerpt.steps)
    zeros, found = torch.zeros(T, dtype=torch.int32), []
    try:
        for spacing in probe.record.spacings:
            position_T = excerpt.start + spacing * torch.arange(T, dtype=torch.int32)
            row = row_pass(draft, Packed(token_T.int(), zeros, position_T, zeros), features, objective)
            inputs = row.chunk(row.trained).head_inputs
            found.append(torch.stack([_sampled(x[: excerpt.slots] @ draft.head.T, J) for x in inputs]))
    finally:
        draft.config = config
    return torch.stack(found)


def _sampled(logits_SW: Tensor, id_J: Tensor) -> Tensor:
    return torch.cat([logits_SW[:, id_J], logits_SW.logsumexp(-1, keepdim=True)], dim=-1)


def _row_of(token: int, id_U: Tensor) -> int:
    rows = (id_U == token).nonzero()
    if not rows.numel():
        raise ValueError(f"the probe has no embedding of token {token}")
    return int(rows[0])


def decode(
    target: DecodingTarget, draft: Draft, prompts: list[list[int]], new_tokens: int, depth: int
) -> ProbeDecoding:
    """Decodes prompts greedily with a draft in chains of `depth` tokens, with the modules in eval mode. Raises
    ValueError if the target cannot verify drafts."""
    from fledge.decode.load import load  # imports transformers, which reading a probe does not need

    traces = quiet_traces(load(target, draft, depth=depth), prompts, new_tokens)
    committed, rounds = zip(*(committed_per_round([trace]) for trace in traces), strict=True)
    dtype = str(target.dtype).removeprefix("torch.")
    return ProbeDecoding(prompts, new_tokens, depth, list(committed), list(rounds), dtype)
