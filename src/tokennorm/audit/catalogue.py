"""The mistakes that the audit knows by name: what each means, and what to do about it.

The order is that in which several mistakes of one loop are listed.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CATALOGUE", "Mistake", "describe"]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One entry.

    Args:
        name: a stable identifier.
        explanation: what the loop does, in one sentence.
        fix: what to do about it.
        needs_ranks: can only be seen with more than one rank; ``needs_micro_batches`` likewise.
    """

    name: str
    explanation: str
    fix: str
    needs_ranks: bool = False
    needs_micro_batches: bool = False


_SUM_OVER_COUNT = (
    "backpropagate sums of token losses, count the supervised tokens of the whole window over all micro-batches "
    "and ranks, and divide once by that count."
)
_FACTOR_FIX = (
    "DDP and FSDP divide gradients by the number of ranks, and some trainers divide by the accumulation steps: "
    "undo exactly what your wrapper does, once."
)

_ENTRIES = (
    Mistake(
        name="mean_of_micro_batch_means",
        explanation="every micro-batch's loss is a mean over its own tokens, and these means are averaged",
        fix=_SUM_OVER_COUNT,
        needs_micro_batches=True,
    ),
    Mistake(
        name="mean_of_rank_means",
        explanation="every rank divides by its own token count, and the ranks' gradients are averaged",
        fix=_SUM_OVER_COUNT,
        needs_ranks=True,
    ),
    Mistake(
        name="mean_of_rank_and_micro_batch_means",
        explanation="every micro-batch on every rank is a mean over its own tokens, and all of these are averaged",
        fix=_SUM_OVER_COUNT,
        needs_ranks=True,
        needs_micro_batches=True,
    ),
    Mistake(
        name="mean_of_sample_means",
        explanation="every sample's loss is a mean over its own tokens, so tokens of short samples count more",
        fix=_SUM_OVER_COUNT,
    ),
    Mistake(
        name="counted_before_shift",
        explanation="the token count includes labels that no position predicts (the first of each row)",
        fix="count the labels after the shift: (labels[:, 1:] != -100).sum().",
    ),
    Mistake(
        name="padding_counted",
        explanation="padding positions are in the token count or in the loss",
        fix="set the labels of padding to -100, and count only what the loss sees.",
    ),
    Mistake(
        name="prompt_counted",
        explanation="the loss is divided by all tokens that are not padding, the unsupervised prompts included",
        fix="count the supervised labels, not the attention mask.",
    ),
    Mistake(
        name="prompt_supervised",
        explanation="prompt tokens, whose labels are -100, take part in the loss",
        fix="use the labels as given; don't rebuild them from input_ids.",
    ),
    Mistake(
        name="shifted_twice",
        explanation="labels are shifted twice, so that every position learns the token after the next",
        fix="shift in one place only: either the data or the model.",
    ),
    Mistake(
        name="not_shifted",
        explanation="labels are not shifted, so that every position learns the token that it reads",
        fix="compare logits[:, :-1] with labels[:, 1:].",
    ),
    Mistake(
        name="targets_cross_documents",
        explanation="in packed rows, the last token of a document learns the first one of the next",
        fix="set the first label of every packed document to -100.",
    ),
    Mistake(
        name="attention_crosses_documents",
        explanation="in packed rows, tokens attend to the documents before their own",
        fix="pass position_ids that restart at every document to a model that reads them, with no attention_mask "
        "and (Hugging Face) use_cache=False: either keeps it from isolating documents.",
    ),
    Mistake(
        name="half_precision_loss",
        explanation="the loss is computed in half precision",
        fix="cast the logits to float32 before the softmax.",
    ),
    Mistake(
        name="half_precision_arithmetic",
        explanation="the model runs under half-precision autocast; the error is rounding, not normalisation",
        fix="nothing, if that is meant: audit with autocast off, or with a tolerance= that allows for it.",
    ),
    Mistake(
        name="label_smoothing_not_normalised",
        explanation="the smoothing part of the loss is not divided by the same token count as the rest",
        fix="smooth inside the per-token loss, then sum and divide once.",
    ),
    Mistake(
        name="auxiliary_loss_multiplied",
        explanation="the auxiliary loss is summed over micro-batches or ranks instead of averaged",
        fix="weight each micro-batch's auxiliary loss by its share of the window's tokens.",
    ),
    Mistake(
        name="auxiliary_loss_divided_by_tokens",
        explanation="the auxiliary loss, a mean already, is divided by a token count too",
        fix="add the auxiliary loss as its own term, with its own denominator.",
    ),
    Mistake(
        name="auxiliary_loss_unweighted",
        explanation="the auxiliary losses of the micro-batches are averaged without their weights",
        fix="weight each by its tokens; or declare a weight of 1 in token_loss if the plain mean is meant.",
    ),
    Mistake(
        name="auxiliary_loss_missing",
        explanation="the auxiliary loss does not reach the gradient",
        fix="add the model's auxiliary loss to what you backpropagate.",
    ),
    Mistake(
        name="factor_ranks_too_much",
        explanation="the gradient is too large by the number of ranks",
        fix=_FACTOR_FIX,
        needs_ranks=True,
    ),
    Mistake(
        name="factor_ranks_too_little",
        explanation="the gradient is too small by the number of ranks",
        fix=_FACTOR_FIX,
        needs_ranks=True,
    ),
    Mistake(
        name="factor_accumulation_too_much",
        explanation="the gradient is too large by the number of accumulation steps",
        fix=_FACTOR_FIX,
        needs_micro_batches=True,
    ),
    Mistake(
        name="factor_accumulation_too_little",
        explanation="the gradient is too small by the number of accumulation steps",
        fix=_FACTOR_FIX,
        needs_micro_batches=True,
    ),
    Mistake(
        name="factor_ranks_and_accumulation_too_much",
        explanation="the gradient is too large by the number of ranks times accumulation steps",
        fix=_FACTOR_FIX,
        needs_ranks=True,
        needs_micro_batches=True,
    ),
    Mistake(
        name="factor_ranks_and_accumulation_too_little",
        explanation="the gradient is too small by the number of ranks times accumulation steps",
        fix=_FACTOR_FIX,
        needs_ranks=True,
        needs_micro_batches=True,
    ),
    Mistake(
        name="constant_factor",
        explanation="the gradient is off by one constant factor in every layout",
        fix="look for a scale that is applied and never undone, such as a loss scaler's.",
    ),
    Mistake(
        name="rescaled_twice",
        explanation="the division by the token count is applied twice",
        fix="rescale the gradients once per window, after the reduction and before clipping.",
    ),
    Mistake(
        name="not_rescaled",
        explanation="the gradient is that of a sum of token losses: the division by the token count is missing",
        fix="rescale the gradients once per window, after the reduction and before clipping.",
    ),
    Mistake(
        name="fixed_division",
        explanation="the gradient is divided by the configured number of accumulation steps, not by the window's",
        fix="divide by what the window really holds, not by the configured number.",
        needs_micro_batches=True,
    ),
    Mistake(
        name="clipped_before_rescaling",
        explanation="gradients are clipped while they still have their provisional scale, and rescaled afterwards",
        fix="reduce, unscale, rescale, then clip.",
    ),
    Mistake(
        name="skipped_micro_batch_counted",
        explanation="a micro-batch does not reach the gradient, but its tokens are in the count",
        fix="take the tokens of a skipped micro-batch out of the count, on all ranks.",
    ),
    Mistake(
        name="micro_batch_skipped",
        explanation="a micro-batch reaches neither the gradient nor the count",
        fix="find out why the loop drops it; the audit's data has nothing that deserves it.",
    ),
    Mistake(
        name="rank_gradient_missing",
        explanation="the gradients of one rank are not in the sum",
        fix="let every rank run the synchronising backward of its last micro-batch, whatever its data.",
        needs_ranks=True,
    ),
    Mistake(
        name="ranks_not_synchronised",
        explanation="every rank steps with the gradients of its own tokens only",
        fix="all-reduce the gradients before the step; for a loop that is meant for one process, pass ranks=(1,).",
        needs_ranks=True,
    ),
    Mistake(
        name="gradients_not_cleared",
        explanation="the gradient of the previous window is still in that of the next",
        fix="call optimizer.zero_grad() after every step.",
    ),
    Mistake(
        name="nan_from_empty_micro_batch",
        explanation="a micro-batch without supervised tokens gives 0/0, and the gradient is not finite",
        fix="backpropagate the sum of the token losses (zero there), not their mean.",
    ),
    Mistake(
        name="not_finite",
        explanation="the gradient is not finite",
        fix="look at the layouts that the table marks.",
    ),
    Mistake(
        name="parameters_without_gradient",
        explanation="parameters that the objective depends on have no gradient when the optimizer reads them",
        fix="look for detach(), no_grad() or an optimizer that holds other parameters than the model.",
    ),
    Mistake(
        name="optimizer_never_stepped",
        explanation="the step function ran without a step of the optimizer that build returned",
        fix="return from build the optimizer that the step uses, and call its step() once per window.",
    ),
    Mistake(
        name="several_steps_per_window",
        explanation="the optimizer stepped more than once in one window",
        fix="step once, after the last micro-batch.",
    ),
    Mistake(
        name="rounding",
        explanation="the normalisation is right, but the gradient differs by more rounding than tolerated",
        fix="look for a part of the loop that computes in a lower precision, or audit with a larger tolerance=.",
    ),
    Mistake(
        name="unknown",
        explanation="none of the known mistakes explains the gradients of all layouts",
        fix="look at the token weights and at the layouts where the error is largest.",
    ),
    Mistake(
        name="cannot_tell",
        explanation="several known mistakes explain these layouts equally well",
        fix="run more layouts (other numbers of ranks and micro-batches) to tell them apart.",
    ),
    Mistake(
        name="loop_failed",
        explanation="the loop did not get through every layout",
        fix="see the failure in the table.",
    ),
)

CATALOGUE: dict[str, Mistake] = {entry.name: entry for entry in _ENTRIES}


def describe(names: tuple[str, ...]) -> tuple[str, str]:
    """Explanation and fix of one or more mistakes, as text. Parts of the loss have names of their own."""
    known = [CATALOGUE.get(name) or _of_a_part(name) for name in names]
    return "; and ".join(m.explanation for m in known), " ".join(_sentence(m.fix) for m in known)


def in_order(names: set[str]) -> tuple[str, ...]:
    """Names in the catalogue's order."""
    order = {name: place for place, name in enumerate(CATALOGUE)}
    return tuple(sorted(names, key=lambda name: (order.get(name, len(order)), name)))


def _of_a_part(name: str) -> Mistake:
    part = name.removesuffix("_not_normalised")
    return Mistake(
        name=name,
        explanation=f"the {part} part of the loss is not divided by the same token count as the rest",
        fix=f"put the {part} part into the per-token loss, then sum and divide once.",
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
