"""Where our own code takes a place in Megatron's training, each with its reason and parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from loongplug.platform.replacements import Replacement, ReplacementTable, as_wrapper

PARAMETER_GROUP = "module"  # the key of an optimizer's groups that says whose parameters they have


def per_module_data_parallel_table(
    *, wrapper: type, optimizer: Callable[[Any], Any]
) -> ReplacementTable:
    """Let Megatron wrap model chunks with ``wrapper`` and wrap its optimizer's constructor."""
    return ReplacementTable(
        "per-module data parallelism",
        (
            Replacement(
                target="megatron.training.training.DDP",
                replacement=wrapper,
                parameters="(config, ddp_config, module, disable_bucketing, pg_collection, "
                "full_param_layout)",
                reason="puts one wrapper with one data parallel group around a whole chunk",
            ),
            Replacement(
                target="megatron.training.training.get_megatron_optimizer",
                wrapper=optimizer,
                parameters="(config, model_chunks, config_overrides, use_gloo_process_groups, "
                "pg_collection, dump_param_to_param_group_map)",
                reason="shards all parameters of a chunk over one data parallel group",
            ),
            *(
                Replacement(  # no function: a tuple of names, which the second has a copy of
                    target=f"megatron.core.optimizer.{file}.param_group_identifier_keys",
                    wrapper=lambda names: (PARAMETER_GROUP, *names),
                    reason="knows groups by their settings, which two modules may share",
                )
                for file in ("optimizer", "distrib_optimizer")
            ),
        ),
        importers=(),  # the training loop's own names only
    )


def rates_table(rates: Callable[[Any], Any]) -> ReplacementTable:
    """Wrap the making of the scheduler of learning rate and weight decay."""
    row = Replacement(
        target="megatron.training.training.get_optimizer_param_scheduler",
        wrapper=rates,
        parameters="(optimizer)",
        reason="multiplies iterations by one batch size, and steps by those there are",
    )
    return ReplacementTable("rates", (row,))


def stepped_schedules_table(schedules: Callable[[Any], Any]) -> ReplacementTable:
    """Wrap the choice of the schedule of a training or evaluation step."""
    row = Replacement(
        target="megatron.training.training.get_forward_backward_func",
        wrapper=schedules,
        parameters="(pp_size, vp_size, schedule_pg_collection)",
        reason="gives schedules that know of no encoder phases before and after them",
    )
    # Of importers, the training loop alone has the name.
    return ReplacementTable("stepped schedules", (row,), importers=())


def rank_order_table(order: Sequence[int], *, first_rank: int) -> ReplacementTable:
    """Have Megatron make its groups with the ranks of ``order`` in the place of their own order.

    Nothing is replaced where there is no ``order``.
    """

    @as_wrapper
    def get_ranks(original: Any, self: Any, token: str) -> list[list[int]]:
        groups = original(self, token)
        # Ascending: so they are in the groups that torch makes of them.
        return [sorted(order[rank - first_rank] for rank in group) for group in groups]

    row = Replacement(
        target="megatron.core.parallel_state.RankGenerator.get_ranks",
        wrapper=get_ranks,
        parameters="(self, token)",
        reason="knows orders of the axes only: none has a tensor parallel group on several stages",
    )
    return ReplacementTable("rank order", (row,) if order else ())


Losses = dict[str, torch.Tensor]


def training_log_table(
    on_iteration: Callable[..., None],
    *,
    on_evaluation: Callable[[Losses], None],
    interval: int,
) -> ReplacementTable:
    """Call ``on_iteration`` and ``on_evaluation(losses)`` as training goes.

    ``on_iteration(iteration, losses, learning_rate=, grad_norm=)`` gets numbers that the host has
    by then, None on ranks that know none. The rate is the iteration's own, in Megatron's logging as
    well.

    They are called after Megatron's own logging of an iteration and after each evaluation, on
    every rank; ``losses`` is empty but on the last pipeline stage. Megatron logs every ``interval``
    iterations, and the first one after each start beside that: what it has summed up then counts
    in the next line too, but where the interval ends with that iteration. A skipped iteration whose
    loss is not a number, for it had no tokens, has none.
    """
    rate: float | None = None  # of the last step
    evaluated: int | None = None  # the iteration of the last evaluation

    @as_wrapper
    def train_step(
        original: Any,
        forward_step: Any,
        data: Any,
        model: Any,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

        nonlocal rate
        rate = None if optimizer is None else get_canonical_lr_for_logging(optimizer.param_groups)
        return original(forward_step, data, model, optimizer, *args, **kwargs)

    @as_wrapper
    def training_log(
        original: Any,
        loss_dict: Losses,
        total_loss_dict: dict[str, Any],
        learning_rate: float | None,
        iteration: int,
        loss_scale: float,
        report_memory_flag: bool,
        skipped_iter: int,
        grad_norm: float | None,
        *args: Any,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> Any:
        if skipped_iter:  # Megatron then waits for the loss as well
            loss_dict = {name: loss for name, loss in loss_dict.items() if not loss.isnan()}
        result = original(
            loss_dict,
            total_loss_dict,
            rate,
            iteration,
            loss_scale,
            report_memory_flag,
            skipped_iter,
            grad_norm,
            *args,
            is_first_iteration=is_first_iteration and iteration % interval != 0,
            **kwargs,
        )
        on_iteration(iteration, loss_dict, learning_rate=rate, grad_norm=grad_norm)
        return result

    @as_wrapper
    def evaluate(original: Any, *args: Any, **kwargs: Any) -> Any:
        losses, other, timed_out = original(*args, **kwargs)
        if not timed_out:
            on_evaluation(losses)
        return losses, other, timed_out

    @as_wrapper
    def evaluate_and_print_results(
        original: Any,
        prefix: str,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        iteration: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        nonlocal evaluated
        if prefix.endswith("on validation set") and iteration == evaluated:
            return
        evaluated = iteration
        original(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs)

    return ReplacementTable(
        "training log",
        (
            Replacement(
                target="megatron.training.training.train_step",
                wrapper=train_step,
                parameters="(forward_step_func, data_iterator, model, optimizer, "
                "opt_param_scheduler, config, forward_backward_func, iteration, pg_collection, "
                "p2p_communicator)",
                reason="moves the learning rate on before anyone can log the one it has used",
            ),
            Replacement(
                target="megatron.training.training.training_log",
                wrapper=training_log,
                parameters="(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, "
                "report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad, "
                "max_attention_logit, pg_collection, is_first_iteration, "
                "seqlen_squared_sum_in_batch, total_real_tokens_in_batch)",
                reason="the only place that knows every iteration's losses; it has no hook. The "
                "line after a start's first one has the first one's loss and time in its means, "
                "also where that one was an interval of its own",
            ),
            Replacement(
                target="megatron.training.training.evaluate",
                wrapper=evaluate,
                parameters="(forward_step_func, data_iterator, model, process_non_loss_data_func, "
                "config, verbose, non_loss_data_func, eval_iters, pg_collection, p2p_communicator)",
                reason="the only place that knows the validation loss; it has no hook",
            ),
            Replacement(
                target="megatron.training.training.evaluate_and_print_results",
                wrapper=evaluate_and_print_results,
                parameters="(prefix, forward_step_func, data_iterator, model, iteration, "
                "process_non_loss_data_func, config, verbose, write_to_tensorboard, "
                "non_loss_data_func, pg_collection, p2p_communicator)",
                reason="after training, validates again what it has just validated where the last "
                "iteration ends an interval",
            ),
        ),
    )


def setup_table(on_setup: Callable[[list[Any], Any], None]) -> ReplacementTable:
    """Call ``on_setup(model_chunks, optimizer)`` on every rank before the first step.

    The chunks are as training has them: wrapped for data parallelism, their weights loaded.
    """

    @as_wrapper
    def setup_model_and_optimizer(original: Any, *args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = original(*args, **kwargs)
        on_setup(model, optimizer)
        return model, optimizer, scheduler

    row = Replacement(
        target="megatron.training.training.setup_model_and_optimizer",
        wrapper=setup_model_and_optimizer,
        parameters="(model_type, model_provider_func, checkpointing_context, *, "
        "cfg_container, pg_collection)",
        reason="the only place that has the optimizer before training; it has no hook",
    )
    return ReplacementTable("setup", (row,))
