locals {
  project = "apexrl"
  tags    = merge(var.tags, { Project = local.project, Cluster = var.name, ManagedBy = "terraform" })

  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition

  # One subnet, as wide as the network where it is the cluster's own. AWS keeps its first four addresses and its last.
  replay_address = local.fixed_addresses[0]
  learner_hosts = [for rank in range(var.learner_hosts) : {
    name    = rank == 0 ? "learner" : "learner-${rank}"
    group   = rank == 0 ? "${var.name}-learner" : "${var.name}-learner-${rank}"
    address = local.fixed_addresses[1 + rank]
  }]

  key_path      = "/${local.project}/${var.name}/keys"
  deadline_name = "/${local.project}/${var.name}/deadline"
  actor_group   = "${var.name}-actor"
  groups        = concat([local.actor_group], local.learner_hosts[*].group)
  log_group     = "/${local.project}/${var.name}"
  bucket_prefix = "${var.name}/"

  instance_types = toset(concat([var.replay_instance_type], var.learner_instance_types, var.actor_instance_types))

  shared_flags = join(" ", [
    "--agent ${var.agent}", "--preset ${var.preset}", "--seed ${var.seed}", "--shards ${local.shards}",
    "--replay-host ${local.replay_address}", "--learner-host ${local.learner_hosts[0].address}",
  ])

  proxy_port = try(tonumber(split(":", var.proxy)[2]), 0)

  acting_flags = join("", [
    var.actor_workers_per_host > 0 ? " --num-workers ${var.actor_workers_per_host}" : "",
    var.environments_per_worker != null ? " --environments-per-worker ${var.environments_per_worker}" : "",
  ])

  # cuda: never a slow learner at a GPU's price.
  learning_flags = "--num-learners ${var.learner_gpus} --learner-hosts ${var.learner_hosts} --device cuda --bind-host 0.0.0.0"

  # /etc/apexrl/role.env of each host: all that makes a host of an image what it is. No secrets: anybody on a host can
  # read user-data.
  shared_environment = {
    APEXRL_CLUSTER     = var.name
    APEXRL_KEYS_PATH   = local.key_path
    APEXRL_DEADLINE    = aws_ssm_parameter.deadline.name
    AWS_DEFAULT_REGION = var.region
  }
  host_environment = merge({
    replay = merge(local.shared_environment, {
      APEXRL_ROLE            = "replay"
      APEXRL_RUN             = var.run
      APEXRL_UNITS           = join(" ", concat(["apexrl-replay.target"], [for shard in range(local.shards) : "apexrl-replay@${shard}.service"]))
      APEXRL_JOURNAL_VOLUME  = aws_ebs_volume.journal.id
      APEXRL_FLAGS           = "${local.shared_flags} --bind-host 0.0.0.0${local.further_flags.replay}"
      APEXRL_EVALUATOR_FLAGS = "${local.shared_flags} --env ${var.env}${local.further_flags.evaluator}"
    })
    actor = merge(local.shared_environment, {
      APEXRL_ROLE  = "actor"
      APEXRL_UNITS = "apexrl-actor.target"
      APEXRL_FLAGS = "${local.shared_flags} --env ${var.env}${local.acting_flags}${local.further_flags.actor}"
    })
    }, { for rank, host in local.learner_hosts : host.name => merge(local.shared_environment, {
      APEXRL_ROLE      = "learner"
      APEXRL_UNITS     = rank == 0 ? "apexrl-learner.target apexrl-tensorboard.service apexrl-sync.timer" : "apexrl-learner.target"
      APEXRL_FLAGS     = "${local.shared_flags} ${local.learning_flags}${local.further_flags.learner}"
      APEXRL_HOST_RANK = rank
      APEXRL_ADDRESS   = host.address
      APEXRL_BUCKET    = var.results_bucket
      APEXRL_RUN       = var.run
      APEXRL_GROUP     = host.group
      APEXRL_GROUPS    = join(" ", [for group in local.groups : group if group != host.group])
  }) })
  user_data = {
    for name, environment in local.host_environment :
    name => templatefile("${path.module}/templates/${var.release == null ? "user-data" : "release"}.yaml.tftpl", {
      environment = environment
      proxy       = var.proxy
      region      = var.region
      bucket      = var.results_bucket
      key         = local.release_key
      version     = coalesce(var.release, "none")
      image       = environment.APEXRL_ROLE == "learner" ? "gpu" : "cpu"
    })
  }
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}
