# Further flags of the roles: names as in `python replay.py --help`, with underscores and without dashes before them.

variable "agent_flags" {
  description = "Flags on which learner, actors and evaluator have to agree, such as { gamma = 0.997 }."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for name, value in var.agent_flags : can(regex(local.flag_patterns.agent[name], value))])
    error_message = "agent_flags: ${join("; ", [for name, value in var.agent_flags : "${name} = \"${value}\" ${try("has to match ${local.flag_patterns.agent[name]}", "is none of ${join(", ", keys(local.flag_patterns.agent))}")}" if !can(regex(local.flag_patterns.agent[name], value))])}."
  }
}

variable "replay_flags" {
  description = "Further flags of replay.py, such as { samples_per_insert = 0.8, capacity = 2000000 }."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for name, value in var.replay_flags : can(regex(local.flag_patterns.replay[name], value))])
    error_message = "replay_flags: ${join("; ", [for name, value in var.replay_flags : "${name} = \"${value}\" ${try("has to match ${local.flag_patterns.replay[name]}", "is none of ${join(", ", keys(local.flag_patterns.replay))}")}" if !can(regex(local.flag_patterns.replay[name], value))])}."
  }
}

variable "learner_flags" {
  description = "Further flags of learner.py, such as { batch_size = 512, total_frames = 200000000 }; a mix of impala's gives replay.py its tables, too."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for name, value in var.learner_flags : can(regex(local.flag_patterns.learner[name], value))])
    error_message = "learner_flags: ${join("; ", [for name, value in var.learner_flags : "${name} = \"${value}\" ${try("has to match ${local.flag_patterns.learner[name]}", "is none of ${join(", ", keys(local.flag_patterns.learner))}")}" if !can(regex(local.flag_patterns.learner[name], value))])}."
  }

  validation {
    condition     = try(tonumber(var.learner_flags["batch_size"]) % local.learners == 0, true)
    error_message = "learner_flags: batch_size ${try(var.learner_flags["batch_size"], "")} is no multiple of the ${local.learners} learners (learner_gpus x learner_hosts), which share each batch."
  }
}

variable "actor_flags" {
  description = "Further flags of actor.py where it acts, such as { environment_groups = 1 }."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for name, value in var.actor_flags : can(regex(local.flag_patterns.actor[name], value))])
    error_message = "actor_flags: ${join("; ", [for name, value in var.actor_flags : "${name} = \"${value}\" ${try("has to match ${local.flag_patterns.actor[name]}", "is none of ${join(", ", keys(local.flag_patterns.actor))}")}" if !can(regex(local.flag_patterns.actor[name], value))])}."
  }
}

variable "evaluator_flags" {
  description = "Further flags of actor.py where it evaluates (on the replay host), such as { episodes = 20 }."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for name, value in var.evaluator_flags : can(regex(local.flag_patterns.evaluator[name], value))])
    error_message = "evaluator_flags: ${join("; ", [for name, value in var.evaluator_flags : "${name} = \"${value}\" ${try("has to match ${local.flag_patterns.evaluator[name]}", "is none of ${join(", ", keys(local.flag_patterns.evaluator))}")}" if !can(regex(local.flag_patterns.evaluator[name], value))])}."
  }
}

# `python -m deploy` reads variables.tf, account.tf and this file alone: they ask nothing of AWS.
locals {
  # The replay host has a server for each shard of the experience.
  learners = var.learner_hosts * var.learner_gpus
  shards   = var.replay_shards > 0 ? var.replay_shards : local.learners

  # Whole GPUs, for which NVIDIA has an open driver. Not p3 (V100), nor g6f and gr6f (slices of a GPU).
  learner_families = ["g4dn", "g5", "g6", "gr6", "g6e", "g7e", "p4d", "p4de", "p5", "p5e", "p5en"]

  # Flag names and what their values look like, made from the code's configuration (`python -m deploy flags`).
  patterns_of_agents = jsondecode(file("${path.module}/flags.json"))
  flag_patterns      = try(local.patterns_of_agents[var.agent], local.patterns_of_agents["apex-dqn"])

  # The tables of a mix, which only the learner knows by that name: as tables_for in apexrl/agents/replaying/mix.py.
  # A part is KIND=SHARE or KIND@CAPACITY=SHARE, with options from the first colon on, which are no matter of a table.
  mix_parts  = try([for part in split(" ", var.learner_flags["mix"]) : regex("^[^:=]+", part)], [])
  mix_pace   = contains(local.mix_parts, "queue") ? "0" : ""
  mix_tables = [for part in local.mix_parts : part == "queue" ? "queue=fifo" : trim("${part}=${startswith(part, "elite-insertion") ? "elite" : "uniform"}:${local.mix_pace}::${try(split("@", part)[1], "")}", ":")]

  replays_by_walking = alltrue([
    var.agent == "impala", contains(local.mix_parts, "uniform"),
    lookup(var.agent_flags, "lstm", "false") == "true", lookup(var.learner_flags, "replay_state", "walk") == "walk",
  ])

  # What the learners share, as share_of in apexrl/learning/sharing.py: each takes its part of a batch, of which the
  # shares of a mix, and minibatches of each, have to be whole numbers of rows.
  batches     = try(jsondecode(file("${path.module}/limits.json")).batches[var.agent][var.preset], { batch_size = 0 })
  batch_size  = try(tonumber(var.learner_flags["batch_size"]), local.batches.batch_size)
  batch_mix   = try(split(" ", var.learner_flags["mix"]), local.batches.mix, [])
  minibatches = try(tonumber(var.learner_flags["minibatches"]), local.batches.minibatches, 1)
  rows        = local.batch_size / local.learners
  shares      = [for part in local.batch_mix : try(regex("=([0-9]+)/([0-9]+)$", part), ["1", "1"])]

  divides_batches = local.batch_size % local.learners == 0 && alltrue([
    for share in concat(local.shares, [["1", "1"]]) : local.rows * share[0] % (share[1] * local.minibatches) == 0
  ])

  # What a variable of flags becomes on a command line.
  further_flags = {
    for role, flags in {
      replay    = merge({ for tables in [join(" ", local.mix_tables)] : "tables" => tables if tables != "" }, var.replay_flags)
      learner   = merge(var.agent_flags, var.learner_flags)
      actor     = merge(var.agent_flags, var.actor_flags)
      evaluator = merge(var.agent_flags, var.evaluator_flags)
      } : role => join("", [
        for name, value in flags : (
          value == "true" ? " --${replace(name, "_", "-")}" :
          value == "false" ? " --no-${replace(name, "_", "-")}" :
          " --${replace(name, "_", "-")} ${value}"
        )
    ])
  }
}
