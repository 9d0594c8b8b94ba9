"""Table of names in other libraries and their equivalents here.

An entry for a method has the overrides that select it, an entry for a key has the equivalent keys,
and a note names features that this project lacks. Tests load every override and look up every key.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alias:
    """One entry of the table.

    `overrides`: dotted.key=value; together they select the method. `keys`: equivalent dotted keys.
    `note`: further information, or the reason why an entry has neither overrides nor keys.
    """

    overrides: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    note: str = ""

    def fix(self, name: str) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.overrides:
            return f"for {name} write {' '.join(self.overrides)}{note}"
        if self.keys:
            return f"use {' or '.join(f'`{key}`' for key in self.keys)}{note}"
        return self.note


# Entries with several spellings are written once.
_GRPO = Alias(
    overrides=("objective.advantage=grpo", "objective.loss=ppo_clip"), note="both are the defaults"
)
_DR_GRPO = Alias(
    overrides=(
        "'objective.advantage={name: grpo, normalize_std: false}'",
        "objective.aggregation=seq-mean-token-sum-norm",
        "objective.norm_length=1024",
    ),
    note="norm_length is the longest response",
)
_REINFORCE_PP = Alias(overrides=("objective.advantage=reinforce_pp", "objective.loss=ppo_clip"))
_TIS = Alias(overrides=("objective.proximal=recompute", "objective.corrections=[tis]"))
_LORA = Alias(keys=("policy.lora",), note="adapters; `policy.lora={}` takes all defaults")
_TARGETS = Alias(keys=("policy.lora.targets",))
# Missing features are listed, too: otherwise their names would be reported as misspelled.
_PAIRS = Alias(note="training on pairs of responses is not supported")
_RANKS = Alias(keys=("policy.parallel.ranks",), note="and `rollout.engines` for the engines")
_PROMPTS = Alias(
    keys=("flow.prompts_per_step",), note="number of prompts, each with `flow.group_size` responses"
)
_MICRO_BATCH = Alias(
    keys=("policy.tokens_per_micro_batch",), note="in tokens; gradients do not depend on it"
)
_MINIBATCH = Alias(
    keys=("objective.minibatches",), note="a number, not a size: each is one optimizer step"
)
_EPOCHS = Alias(keys=("objective.epochs",), note="number of passes over each batch")
_GROUP = Alias(keys=("flow.group_size",), note="responses per prompt")
_STEPS = Alias(keys=("run.steps",), note="batches; epochs over the prompts are not counted")
_STALENESS = Alias(
    keys=("flow.async_ratio",), note="largest staleness of a trained sample, in weight versions"
)
_CLIP = Alias(keys=("objective.loss.clip_low", "objective.loss.clip_high"))
_KL = Alias(keys=("objective.kl.coef",))
_RESPONSE = Alias(keys=("rollout.sampling.max_tokens",))
_CONTEXT = Alias(keys=("rollout.max_context",), note="prompt and response together")
_MODEL = Alias(keys=("model.path",), note="a local directory, or hf://OWNER/NAME")
_TRAIN = Alias(keys=("data.train",), note="a file or folder; a mixture is data.sources")
_GRAMMAR = Alias(
    keys=("eval.sampling.json_schema", "eval.sampling.regex"),
    note="for held-out prompts only: the trainer's log-probs do not account for a grammar",
)
_DTYPE = Alias(keys=("model.dtype",))
_REWARD = Alias(keys=("rollout.reward.name",), note="a built-in one or module:function")
_ENVIRONMENT = Alias(keys=("rollout.environment",), note="module:factory, or an adapter")
_TURNS = Alias(keys=("rollout.environment.max_turns",))
_GROUP_REWARD = Alias(
    keys=("rollout.reward.per",),
    note="per: group, with a function(prompt, responses) that returns a number for each response",
)
_EXPERT_TENSOR = Alias(
    keys=("policy.parallel.expert",),
    note=("each expert stays whole on one rank: expert tensor parallelism is not supported"),
)
_TRACKERS = Alias(
    keys=("observe.trackers",),
    note="a list such as [wandb]; for offline mode set the tracker's variable, WANDB_MODE=offline",
)
_REPLAY = Alias(keys=("policy.routing_replay",))
_TENSOR = Alias(
    keys=("policy.parallel.tensor", "rollout.tensor"), note="for the policy and the engines"
)
_PIPELINE = Alias(keys=("policy.parallel.pipeline", "rollout.pipeline"), note=_TENSOR.note)

# Names are in lower case with underscores: `alias_fix` converts a name before the look-up.
ALIASES = {
    # Methods.
    "grpo": _GRPO,
    "dr_grpo": _DR_GRPO,
    "drgrpo": _DR_GRPO,
    "dapo": Alias(
        overrides=(
            "'objective.loss={name: ppo_clip, clip_high: 0.28}'",
            "flow.dynamic_sampling=true",
        ),
        note="its length penalty is `objective.overlong`",
    ),
    "ppo": Alias(
        overrides=("objective.loss=ppo_clip", "objective.advantage=gae", "'objective.value={}'")
    ),
    "reinforce++": _REINFORCE_PP,
    "reinforce_plus_plus": _REINFORCE_PP,
    "truncated_is": _TIS,
    "truncated_importance_sampling": _TIS,
    # Unsupported methods, listed so that their names get an explanation.
    "dpo": _PAIRS,
    "kto": _PAIRS,
    "peft": _LORA,
    "use_peft": _LORA,
    "lora_rank": Alias(keys=("policy.lora.rank",)),
    "lora_r": Alias(keys=("policy.lora.rank",)),
    "lora_alpha": Alias(keys=("policy.lora.alpha",)),
    "lora_dropout": Alias(keys=("policy.lora.dropout",)),
    "target_modules": _TARGETS,
    "lora_target_modules": _TARGETS,
    # The run and its model.
    "output_dir": Alias(keys=("run.dir",)),
    "model_name": _MODEL,
    "model_name_or_path": _MODEL,
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "precision": _DTYPE,
    "torch_dtype": _DTYPE,
    "max_steps": _STEPS,
    "total_steps": _STEPS,
    "total_training_steps": _STEPS,
    "total_epochs": _STEPS,
    "num_train_epochs": _STEPS,
    "save_steps": Alias(keys=("checkpoint.every",)),
    "save_freq": Alias(keys=("checkpoint.every",)),
    "save_total_limit": Alias(keys=("checkpoint.keep",)),
    "eval_steps": Alias(keys=("eval.every",)),
    "test_freq": Alias(keys=("eval.every",)),
    "report_to": _TRACKERS,
    "wandb": _TRACKERS,
    "use_wandb": _TRACKERS,
    "logger": _TRACKERS,
    # The optimizer.
    "learning_rate": Alias(keys=("policy.optimizer.lr",)),
    "max_grad_norm": Alias(keys=("policy.optimizer.clip_grad",)),
    "grad_clip": Alias(keys=("policy.optimizer.clip_grad",)),
    "lr_scheduler": Alias(keys=("policy.optimizer.schedule",)),
    "lr_scheduler_type": Alias(keys=("policy.optimizer.schedule",)),
    "lr_warmup_steps": Alias(keys=("policy.optimizer.warmup_steps",)),
    "warmup_ratio": Alias(keys=("policy.optimizer.warmup_steps",), note="in steps"),
    # Batches.
    # Libraries count these in prompts or in responses, so the note names the unit.
    "batch_size": _PROMPTS,
    "train_batch_size": _PROMPTS,
    "global_batch_size": _PROMPTS,
    "rollout_batch_size": _PROMPTS,
    "micro_batch_size": _MICRO_BATCH,
    "mini_batch_size": _MINIBATCH,
    "ppo_mini_batch_size": _MINIBATCH,
    "num_mini_batches": _MINIBATCH,
    "ppo_epochs": _EPOCHS,
    "num_ppo_epochs": _EPOCHS,
    "num_iterations": _EPOCHS,
    "per_device_train_batch_size": _MICRO_BATCH,
    "gradient_accumulation_steps": _MICRO_BATCH,
    "num_generations": _GROUP,
    "rollout_n": _GROUP,
    "n": _GROUP,
    "n_samples_per_prompt": _GROUP,
    "staleness": _STALENESS,
    "max_staleness": _STALENESS,
    "staleness_threshold": _STALENESS,
    "max_off_policy_steps": _STALENESS,
    # The objective.
    "kl_coef": _KL,
    "kl_loss_coef": _KL,
    "clip_ratio": _CLIP,
    "clip_eps": _CLIP,
    "cliprange": _CLIP,
    "epsilon": _CLIP,
    "entropy_coef": Alias(keys=("objective.entropy_bonus",)),
    "entropy_coeff": Alias(keys=("objective.entropy_bonus",)),
    # Rollouts.
    "max_new_tokens": _RESPONSE,
    "max_response_length": _RESPONSE,
    "max_completion_length": _RESPONSE,
    "max_prompt_length": Alias(
        keys=("data.max_prompt_tokens",), note="longer prompts are left out"
    ),
    "max_model_len": _CONTEXT,
    "max_seq_len": _CONTEXT,
    "max_seq_length": _CONTEXT,
    "structured_outputs": _GRAMMAR,
    "guided_decoding": _GRAMMAR,
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "dataset": _TRAIN,
    "dataset_name": _TRAIN,
    "prompt_data": _TRAIN,
    "train_files": _TRAIN,
    "val_files": Alias(keys=("data.eval",), note="a file or folder; list several as eval.sets"),
    "input_key": Alias(keys=("data.prompt_key",)),
    "label_key": Alias(keys=("data.answer_key",)),
    "tool_key": Alias(keys=("data.tools_key",)),
    "apply_chat_template": Alias(keys=("data.as_chat",)),
    "chat_template_kwargs": Alias(keys=("data.chat_template_options",)),
    "apply_chat_template_kwargs": Alias(keys=("data.chat_template_options",)),
    "reward_fn": _REWARD,
    "reward_funcs": _REWARD,
    "reward_function": _REWARD,
    "custom_reward_function": _REWARD,
    "custom_rm_path": _REWARD,
    "rm_type": _REWARD,
    "rm_url": Alias(keys=("rollout.reward.settings",), note="url, with `rollout.reward.name` http"),
    "reward_weights": Alias(
        keys=("rollout.reward.parts.NAME.weight",), note="NAME is any name that you choose"
    ),
    "reward_fn_key": Alias(
        keys=("rollout.reward.parts.NAME.where",), note="a mapping of columns to values"
    ),
    "group_rm": _GROUP_REWARD,
    "environment_factory": _ENVIRONMENT,
    "rollout_func": _ENVIRONMENT,
    "multi_turn": _ENVIRONMENT,
    "custom_generate_function_path": _ENVIRONMENT,
    "max_assistant_turns": _TURNS,
    "max_tool_calling_iterations": _TURNS,
    "tool_config_path": Alias(
        keys=("rollout.environment.settings",), note="an environment defines its own tools"
    ),
    "filter_overlong_prompts": Alias(keys=("data.max_prompt_tokens",)),
    # Machines.
    "num_gpus": _RANKS,
    "n_gpus_per_node": _RANKS,
    "world_size": _RANKS,
    "tensor_parallel_size": _TENSOR,
    "tensor_model_parallel_size": _TENSOR,
    "tp": _TENSOR,
    "pipeline_parallel_size": _PIPELINE,
    "pipeline_model_parallel_size": _PIPELINE,
    "pp": _PIPELINE,
    "expert_parallel_size": Alias(keys=("policy.parallel.expert",)),
    "expert_model_parallel_size": Alias(keys=("policy.parallel.expert",)),
    "ep": Alias(keys=("policy.parallel.expert",)),
    "expert_tensor": _EXPERT_TENSOR,
    "expert_tensor_parallel_size": _EXPERT_TENSOR,
    "etp": _EXPERT_TENSOR,
    "moe_enable_routing_replay": _REPLAY,
    "use_rollout_routing_replay": _REPLAY,
    "router_replay": _REPLAY,
    "context_parallel_size": Alias(keys=("policy.parallel.context",)),
    "cp": Alias(keys=("policy.parallel.context",)),
}


def alias_fix(name: str) -> str | None:
    """Return the fix for `name`, a name of another library; None if the table lacks it."""
    alias = ALIASES.get(name.lower().replace("-", "_"))
    return alias.fix(name) if alias is not None else None
