"""Make a Hugging Face ``Trainer``, TRL's ``SFTTrainer``, or a subclass of either, exact.

::

    from tokennorm.integrations.hf import token_normalised

    trainer = token_normalised(Trainer)(model=model, args=args, train_dataset=dataset)
    trainer.train()

Every supervised token counts once in every optimizer step: over accumulation steps, ranks (DDP), short last
windows and empty micro-batches, for dense models and for mixtures of experts. The logged loss and ``eval_loss``
are sums of token losses over numbers of tokens.

The window of an optimizer step is *counted*: the Trainer has all its micro-batches before the first backward, so
one all-reduce of the token count comes first, and no gradient is touched afterwards. Clipping, loss scaling and
the logged gradient norm therefore see the exact gradient.

Tested with transformers 5.24, TRL 1.16, Accelerate 1.15, PEFT 0.21. Other major versions are refused, and so is
whatever could not be shown to be exact (``checks.py`` lists it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from tokennorm.errors import ConfigError
from tokennorm.integrations.hf.token_losses import TokenLosses
from tokennorm.integrations.hf.versions import require

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["TokenLosses", "token_normalised"]

TrainerT = TypeVar("TrainerT", bound="Trainer")


def token_normalised(trainer_class: type[TrainerT]) -> type[TrainerT]:
    """The same trainer class, exact. It takes the same arguments and keeps everything else as it is.

    A subclass keeps its own methods. Where its ``compute_loss`` calls ``super().compute_loss(...)`` it gets the
    exact loss, and must return it unchanged; one with a loss of its own is refused at the first step, before the
    optimizer moves. Such a loss goes into :meth:`token_losses`::

        class MyTrainer(token_normalised(Trainer)):
            def token_losses(self, model, inputs):
                outputs = model(input_ids=inputs["input_ids"])
                return TokenLosses(losses=my_losses(outputs.logits, inputs["labels"]))  # [B, S], 0 where ignored

            def token_weights(self, inputs):  # [B, S]: which tokens count (bool), or how much (float)
                return my_mask(inputs)

    Logged beside ``loss`` (mean loss per supervised token since the last log): ``supervised_tokens``, their
    number; ``router_loss``, what the model adds to its loss by itself (its coefficient included), averaged over
    micro-batches by their supervised tokens. ``loss`` and ``eval_loss`` don't contain it: it depends on the split.

    Args:
        trainer_class: ``transformers.Trainer``, ``trl.SFTTrainer``, or a subclass of one of them.

    Returns:
        A subclass of it. Calling it raises ConfigError for what is not supported (DeepSpeed, FSDP, tensor or
        context parallelism, ``compute_loss_func``, ...), and PatchError for a model whose token losses can't be
        had.

    Raises:
        MissingDependencyError: transformers or Accelerate is not installed.
        ConfigError: the class is no Trainer, is a trainer with another objective, or the installed versions are
            not those that were tested.
    """
    require("transformers", "accelerate")
    from transformers import Trainer

    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise ConfigError(
            f"token_normalised got {trainer_class!r}, not a subclass of transformers.Trainer",
            fix="pass the class, and call what comes back: token_normalised(Trainer)(model=..., args=...).",
        )
    exact = _exact_base(trainer_class)
    if issubclass(trainer_class, exact):
        return trainer_class
    if issubclass(exact, trainer_class):
        return exact
    # The exact class goes in right above the library's own: the person's overrides stay in front of it.
    name = f"TokenNormalised{trainer_class.__name__}"
    body = {"__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__}
    return cast("type[TrainerT]", type(name, (trainer_class, exact), body))


def _exact_base(trainer_class: type) -> type:
    """The exact form of the library's class that ``trainer_class`` derives from."""
    theirs = next((cls for cls in trainer_class.__mro__ if cls.__module__.split(".")[0] == "trl"), None)
    if theirs is None:
        from tokennorm.integrations.hf.trainer import TokenNormalisedTrainer

        return TokenNormalisedTrainer
    if theirs.__name__ != "SFTTrainer":
        raise ConfigError(
            f"{trainer_class.__name__} is TRL's {theirs.__name__}, or a subclass of it",
            why="its objective is no mean over supervised tokens; there is nothing to normalise by their number.",
            fix="token_normalised is for transformers.Trainer and trl.SFTTrainer.",
        )
    require("trl")
    from tokennorm.integrations.hf.sft import TokenNormalisedSFTTrainer

    return TokenNormalisedSFTTrainer
