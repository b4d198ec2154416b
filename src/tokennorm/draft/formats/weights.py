"""Which weights servers look for, under which names and in which shapes."""

from __future__ import annotations

from collections.abc import Mapping

from tokennorm.draft.formats.contents import Findings, Folder, Server, Shape

__all__ = ["check_weights"]

_MARKOV = {
    "vanilla": ("markov_w1.weight", "markov_w2.weight"),
    "gated": ("markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias"),
    "rnn": ("markov_w1.weight", "markov_w2.weight", "joint_proj.weight", "joint_proj.bias"),
}
_LENT = ("embed_tokens.weight", "lm_head.weight")
_IGNORED = (
    "t2d",
    "d2t",
    "rotary_emb.inv_freq",
    "mask_embedding",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)


def check_weights(folder: Folder, server: Server) -> Findings:
    """Everything about the weights that ``server`` would object to."""
    yield from _backbone(folder)
    yield from _vocabulary(folder, server)
    yield from _markov(folder, server)
    yield from _confidence(folder, server)


def _backbone(folder: Folder) -> Findings:
    decoder, ids = folder.decoder, folder.layer_ids or []
    width, inner = int(decoder["hidden_size"]), int(decoder["intermediate_size"])
    heads = int(decoder["num_attention_heads"])
    shared = int(decoder.get("num_key_value_heads") or heads)
    size = int(decoder.get("head_dim") or width // heads)
    expected: dict[str, Shape] = {
        "fc.weight": (width, len(ids) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(int(decoder["num_hidden_layers"])):
        at = f"layers.{i}."
        expected |= {
            f"{at}self_attn.q_proj.weight": (heads * size, width),
            f"{at}self_attn.k_proj.weight": (shared * size, width),
            f"{at}self_attn.v_proj.weight": (shared * size, width),
            f"{at}self_attn.o_proj.weight": (width, heads * size),
            f"{at}self_attn.q_norm.weight": (size,),
            f"{at}self_attn.k_norm.weight": (size,),
            f"{at}mlp.gate_proj.weight": (inner, width),
            f"{at}mlp.up_proj.weight": (inner, width),
            f"{at}mlp.down_proj.weight": (width, inner),
            f"{at}input_layernorm.weight": (width,),
            f"{at}post_attention_layernorm.weight": (width,),
        }
    prefixed = [name for name in folder.shapes if name.startswith("model.")]
    if prefixed:
        yield "refuses", f"weights are named {prefixed[0]} and so on: the prefix model. has to go"
        return
    norms = {name for name in expected if name.endswith(("q_norm.weight", "k_norm.weight"))}
    if norms.isdisjoint(folder.shapes):
        yield (
            "refuses",
            "the layers have no q_norm and k_norm: servers' drafter classes are Qwen3's and normalise queries "
            "and keys, with whatever weights; train with qk_norm=True",
        )
        yield from _shapes(folder, {name: shape for name, shape in expected.items() if name not in norms})
    else:
        yield from _shapes(folder, expected)
    heads_and_tables = ("markov_head.", "confidence_head.")
    unknown = [
        name
        for name in folder.shapes
        if name not in expected and name not in (*_LENT, *_IGNORED) and not name.startswith(heads_and_tables)
    ]
    if unknown:
        yield "refuses", f"{len(unknown)} weights that no loader knows, the first is {unknown[0]}"


def _vocabulary(folder: Folder, server: Server) -> Findings:
    decoder, shapes = folder.decoder, folder.shapes
    vocabulary, width = int(decoder["vocab_size"]), int(decoder["hidden_size"])
    drafted = int(folder.get("draft_vocab_size") or vocabulary)
    expected = {"embed_tokens.weight": (vocabulary, width), "lm_head.weight": (drafted, width)}
    yield from _shapes(folder, {name: shape for name, shape in expected.items() if name in shapes})
    if drafted >= vocabulary:
        if server == "sglang" and not folder.nested and "lm_head.weight" in shapes:
            yield "notes", "embed_tokens and lm_head are skipped, the target's are used: they must be the same"
        return
    if server == "sglang":
        yield (
            "refuses",
            f"a reduced vocabulary ({drafted} of {vocabulary} tokens): SGLang drafts with the target's head",
        )
        return
    if "lm_head.weight" not in shapes:
        yield "refuses", "a reduced vocabulary needs a head of its own (lm_head.weight)"
    if folder.offsets is None:
        yield "refuses", "a reduced vocabulary needs d2t, the offset from each draft token to its target token"
        return
    if len(folder.offsets) != drafted:
        yield "refuses", f"d2t has {len(folder.offsets)} entries for {drafted} draft tokens"
    ids = [i + offset for i, offset in enumerate(folder.offsets)]
    if min(ids) < 0 or max(ids) >= vocabulary or len(set(ids)) != len(ids):
        yield (
            "refuses",
            (
                "d2t + position is no set of different target tokens: it has to hold offsets, not the tokens "
                "themselves"
            ),
        )
    if server == "speculators" and "t2d" not in shapes:
        yield "refuses", "a reduced vocabulary needs t2d, the mask of drafted target tokens"


def _markov(folder: Folder, server: Server) -> Findings:
    rank, kind = folder.rank, folder.get("markov_head_type")
    own = {name.removeprefix("markov_head.") for name in folder.shapes if name.startswith("markov_head.")}
    if rank == 0:
        if own:
            yield "refuses", "there are markov_head weights, but markov_rank is 0 or missing"
        if not folder.is_dflash and server != "speculators":
            yield (
                "refuses",
                "a DSpark drafter needs a Markov head (markov_rank > 0); without one serve it as DFlash",
            )
        return
    if kind is None and server == "sglang":
        yield "refuses", "markov_head_type is missing (vanilla, gated or rnn)"
    kind = kind or "vanilla"
    if kind not in _MARKOV:
        yield "refuses", f"markov_head_type {kind!r} is none of vanilla, gated and rnn"
        return
    if kind != "vanilla" and server == "vllm":
        yield "refuses", f"vLLM has the vanilla Markov head only, not {kind}"
    vocabulary = int(folder.decoder["vocab_size"])
    drafted = int(folder.get("draft_vocab_size") or vocabulary)
    if missing := [name for name in _MARKOV[kind] if name not in own]:
        yield "refuses", f"the {kind} Markov head lacks {', '.join(missing)}"
    if unknown := sorted(own - set(_MARKOV[kind])):
        yield "refuses", f"the {kind} Markov head has no {', '.join(unknown)}"
    expected = {
        "markov_head.markov_w1.weight": (vocabulary, rank),
        "markov_head.markov_w2.weight": (drafted, rank),
    }
    yield from _shapes(folder, {name: shape for name, shape in expected.items() if name in folder.shapes})


def _confidence(folder: Folder, server: Server) -> Findings:
    enabled = bool(folder.get("enable_confidence_head"))
    names = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    present = [name for name in names if name in folder.shapes]
    if not enabled:
        if present:
            yield "degrades", "there are confidence_head weights, but enable_confidence_head is not set"
        return
    if len(present) < 2:
        missing = ", ".join(name for name in names if name not in present)
        if server == "vllm" and not present:
            yield "degrades", f"the confidence head is switched off: the folder has no {missing}"
        else:
            yield "refuses", f"the confidence head is enabled, but the folder has no {missing}"
        return
    with_markov = folder.get("confidence_head_with_markov")
    if with_markov and not folder.rank:
        yield "refuses", "confidence_head_with_markov needs markov_rank > 0"
    width = int(folder.decoder["hidden_size"]) + (folder.rank if with_markov else 0)
    yield from _shapes(folder, {names[0]: (1, width), names[1]: (1,)})


def _shapes(folder: Folder, expected: Mapping[str, Shape]) -> Findings:
    missing = [name for name in expected if name not in folder.shapes]
    if missing:
        yield "refuses", f"{len(missing)} weights are missing, the first is {missing[0]}"
    for name, shape in expected.items():
        if name in folder.shapes and folder.shapes[name] != shape:
            yield "refuses", f"{name} is {list(folder.shapes[name])}, config.json makes it {list(shape)}"
