"""Adapter for Axolotl: ``plugins: [longshore.axolotl.Plugin]`` in the YAML, and a section ``longshore`` with the job's options.

.. code-block:: yaml

    plugins:
      - longshore.axolotl.Plugin
    longshore:
      servers: host1:7070,host2:7070
      job: my-run

Learning rate, betas, epsilon, weight decay, clipping and schedule are Axolotl's own. ``resume_from_checkpoint`` returns to the servers'
checkpoint of that save.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from longshore import optim
from longshore.checkpoint.trainer import Callback
from longshore.errors import invalid
from longshore.transfer import params
from longshore.transfer.options import Options

__all__ = ["LongshoreArgs", "Plugin"]


class LongshoreArgs(BaseModel):
    """The plugin's additions to Axolotl's configuration: options of :class:`longshore.transfer.options.Options`, and ``rule``."""

    longshore: dict[str, Any] | None = None


class Plugin(BasePlugin):
    """Puts the trainer's optimizer on servers."""

    def get_input_args(self) -> str:
        return "longshore.axolotl.LongshoreArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Sets the optimizer's class for the trainer, which builds the param groups.

        The trainer gives its optimizer no names of parameters, so they are learned here. The callback would learn them
        in ``on_init_end``, but Axolotl adds the callback only afterwards.

        Raises:
            InvalidError: naming the key under ``longshore``.
        """
        trainer.optimizer_cls_and_kwargs = _optimizer(cfg, trainer.args)
        params.learn_names(trainer.model.named_parameters())

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [Callback()]


def _optimizer(cfg: Any, args: Any) -> tuple[type[optim.Optimizer], dict[str, Any]]:
    options = dict(cfg.get("longshore") or {})
    rule = options.pop("rule", "adamw")
    if rule not in optim.RULES:
        raise invalid("longshore.rule", repr(rule), "one of " + ", ".join(optim.RULES), "choose one of them")
    if options.get("streaming"):
        remedy = "leave it out: the trainer clips and accumulates"
        raise invalid("longshore.streaming", True, "left out under Axolotl", remedy)
    try:
        Options.of(options)
    except TypeError as error:
        raise invalid("longshore", ", ".join(options), "options of the job", str(error)) from error
    arguments: dict[str, Any] = {"lr": args.learning_rate}
    if rule in ("adamw", "adam"):
        arguments |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return optim.RULES[rule], {**arguments, **options}
