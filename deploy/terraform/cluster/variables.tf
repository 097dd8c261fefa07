variable "name" {
  description = "Name of the cluster: of its resources, of its keys (/apexrl/NAME/keys), of its directory in the bucket."
  type        = string
  default     = "apexrl"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", var.name))
    error_message = "name has to be 3 to 20 small letters, digits and dashes, beginning with a letter, such as apexrl."
  }

  validation {
    condition     = var.name != "releases"
    error_message = "name must not be releases: there the bucket keeps the releases, and a learner may write to the directory of its cluster's name."
  }
}

variable "region" {
  description = "AWS region of the cluster, of its images and of the results bucket."
  type        = string
  default     = "us-east-1"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region has to be the name of an AWS region, such as us-east-1: `aws ec2 describe-regions` lists them."
  }
}

variable "availability_zone" {
  description = "Zone of all hosts: traffic between zones would cost more than the hosts. null: the first that offers all instance types, kept from then on."
  type        = string
  default     = null

  validation {
    condition     = var.availability_zone == null || can(regex("^${var.region}[a-z]$", var.availability_zone))
    error_message = "availability_zone has to be a zone of region ${var.region}, such as ${var.region}a; leave it out to get the first that offers all instance types."
  }
}

variable "tags" {
  description = "Further tags of everything that can be tagged."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = length(setintersection(keys(var.tags), ["Project", "Cluster", "Role", "Name", "ManagedBy"])) == 0
    error_message = "tags must not hold Project, Cluster, Role, Name or ManagedBy: those are set here; choose other names."
  }

  validation {
    condition     = alltrue([for name, value in var.tags : !startswith(lower(name), "aws:")])
    error_message = "tags must not begin with aws: because AWS keeps such names for itself; choose other names."
  }
}

# What is trained.

variable "env" {
  description = "Gymnasium id of the environment. The images have Atari's games and those that Gymnasium brings without extras."
  type        = string
  default     = "PongNoFrameskip-v4"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_.:/-]+$", var.env))
    error_message = "env has to be a Gymnasium id without spaces, such as PongNoFrameskip-v4 or ALE/Breakout-v5."
  }
}

variable "agent" {
  description = "The algorithm, such as apex-dqn (Ape-X) or impala (IMPALA; with a mix in learner_flags LASER)."
  type        = string
  default     = "apex-dqn"
  nullable    = false

  validation {
    condition     = contains(keys(local.patterns_of_agents), var.agent)
    error_message = "agent has to be ${join(" or ", keys(local.patterns_of_agents))}."
  }
}

variable "preset" {
  description = "Defaults of flags that are not given: paper (Ape-X, Atari), gpu, two-cores, or small (observations of a few numbers)."
  type        = string
  default     = "paper"
  nullable    = false

  validation {
    condition     = contains(["paper", "gpu", "two-cores", "small"], var.preset)
    error_message = "preset has to be paper, gpu, two-cores or small. There is no auto here: all hosts have to agree."
  }
}

variable "seed" {
  description = "Seed of the network, of the sampling, and of environments and exploration."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.seed >= 0 && var.seed < 4294967296 && floor(var.seed) == var.seed
    error_message = "seed has to be a whole number from 0 to 4294967295."
  }
}

variable "run" {
  description = "Name of the run in the bucket and in the journal. Learner and replay go on with what they find under this name: give another name to begin anew."
  type        = string
  default     = "run-1"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$", var.run))
    error_message = "run has to be at most 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit."
  }
}

variable "results_bucket" {
  description = "Bucket for checkpoints and event files, in the same region; made by deploy/terraform/bootstrap, outlives the cluster."
  type        = string
  default     = null

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.results_bucket))
    error_message = "results_bucket has to name the bucket for checkpoints. Make it with `terraform -chdir=deploy/terraform/bootstrap apply`, then: terraform -chdir=deploy/terraform/bootstrap output -raw cluster_tfvars > deploy/terraform/cluster/bootstrap.auto.tfvars"
  }
}

# Hosts.

variable "image_version" {
  description = "Tag Version of the images. null: the newest when this is first applied, kept from then on; \"latest\": the newest at each apply. Other images replace the hosts."
  type        = string
  default     = null

  validation {
    condition     = var.image_version == null || can(regex("^[A-Za-z0-9][A-Za-z0-9_.+-]*$", var.image_version))
    error_message = "image_version has to be the tag Version of an image that was built with Packer, or \"latest\"; leave it out to keep the first."
  }
}

variable "release" {
  description = "Version in the results bucket (releases/VERSION.tar) that hosts install at their first start, on public images. null: hosts start from images that Packer has built."
  type        = string
  default     = null

  validation {
    condition     = var.release == null || can(regex("^[0-9A-Za-z][0-9A-Za-z._-]{0,63}$", var.release))
    error_message = "release has to be a version of letters, digits, dots, dashes and underscores, as deploy/packer/release.sh takes it; leave it out to start from images."
  }
}

variable "replay_instance_type" {
  description = "Instance type of the replay host: memory for the log, network for the actors, cores for the evaluator."
  type        = string
  default     = "r6in.4xlarge"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.replay_instance_type))
    error_message = "replay_instance_type has to be an EC2 instance type, such as r6in.4xlarge."
  }
}

variable "learner_instance_types" {
  description = "Instance types of each learner host, with an NVIDIA GPU, the preferred first. Another one is taken where EC2 has no capacity of it."
  type        = list(string)
  default     = ["g6.4xlarge", "g5.4xlarge"]
  nullable    = false

  validation {
    condition     = length(var.learner_instance_types) >= 1 && length(var.learner_instance_types) <= 40
    error_message = "learner_instance_types has to name 1 to 40 instance types, such as [\"g6.4xlarge\", \"g5.4xlarge\"]."
  }

  validation {
    condition     = alltrue([for type in var.learner_instance_types : can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", type))])
    error_message = "learner_instance_types has to hold EC2 instance types with NVIDIA GPUs, such as [\"g6.4xlarge\", \"g5.4xlarge\"]."
  }

  validation {
    condition     = length(distinct(var.learner_instance_types)) == length(var.learner_instance_types)
    error_message = "learner_instance_types names a type twice: name each once."
  }
}

variable "learner_gpus" {
  description = "GPUs of each learner host that make every update together, a process each. More than one needs a type that has them, such as g6.12xlarge (4) or g6.48xlarge (8)."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = contains([1, 2, 4, 8], var.learner_gpus)
    error_message = "learner_gpus has to be 1, 2, 4 or 8: batches are divided among so many."
  }
}

variable "learner_hosts" {
  description = "Learner hosts of learner_gpus each, all of which make every update together. Take more GPUs in one host first: between hosts the gradients go over the network."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = contains([1, 2, 4, 8], var.learner_hosts) && try(var.learner_hosts * var.learner_gpus <= 16, true)
    error_message = "learner_hosts has to be 1, 2, 4 or 8, and with learner_gpus ${var.learner_gpus} at most 16 GPUs in all: each has a replay server of the one replay host."
  }
}

variable "replay_shards" {
  description = "Replay servers of the replay host, each with its part of the experience and of the actors; 0: as many as there are learner GPUs on all hosts. A run keeps their number: with 8 it can go on with 1, 2, 4 or 8 GPUs."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.replay_shards >= 0 && var.replay_shards <= 16 && floor(var.replay_shards) == var.replay_shards
    error_message = "replay_shards has to be a whole number of servers from 0 to 16; 0: as many as there are learner GPUs."
  }

  validation {
    condition     = try(var.replay_shards % local.learners == 0, true)
    error_message = "replay_shards ${var.replay_shards} is no multiple of the ${local.learners} learners (learner_gpus x learner_hosts): each has to follow as many."
  }
}

variable "actor_instance_types" {
  description = "Instance types of the actor hosts, the preferred first. Several make it likely that spot capacity is found."
  type        = list(string)
  default     = ["c7i.8xlarge", "c6i.8xlarge", "m7i.8xlarge", "m6i.8xlarge"]
  nullable    = false

  validation {
    condition     = length(var.actor_instance_types) >= 1 && length(var.actor_instance_types) <= 40
    error_message = "actor_instance_types has to name 1 to 40 instance types, such as [\"c7i.8xlarge\", \"c6i.8xlarge\"]."
  }

  validation {
    condition     = alltrue([for type in var.actor_instance_types : can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", type))])
    error_message = "actor_instance_types has to hold EC2 instance types, such as [\"c7i.8xlarge\", \"c6i.8xlarge\"]."
  }

  validation {
    condition     = length(distinct(var.actor_instance_types)) == length(var.actor_instance_types)
    error_message = "actor_instance_types names a type twice: name each once."
  }
}

variable "actor_hosts" {
  description = "Number of actor hosts; 0 keeps the rest of the cluster without acting."
  type        = number
  default     = 6
  nullable    = false

  validation {
    condition     = var.actor_hosts >= 0 && var.actor_hosts <= 200 && floor(var.actor_hosts) == var.actor_hosts
    error_message = "actor_hosts has to be a whole number of hosts from 0 to 200."
  }

  validation {
    # Beside them are AWS's five, the replay host's, two of each of eight learner hosts, and hosts that come before others go.
    condition     = try(var.actor_hosts + ceil(var.actor_hosts / 10) + 22 <= pow(2, 32 - tonumber(split("/", var.vpc_cidr)[1])), true)
    error_message = "actor_hosts is more than the addresses of vpc_cidr ${var.vpc_cidr}: give a wider vpc_cidr, such as 10.79.0.0/20, or fewer hosts."
  }
}

variable "actor_on_demand_hosts" {
  description = "How many of actor_hosts are on-demand; the others are spot instances."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.actor_on_demand_hosts >= 0 && var.actor_on_demand_hosts <= var.actor_hosts && floor(var.actor_on_demand_hosts) == var.actor_on_demand_hosts
    error_message = "actor_on_demand_hosts has to be a whole number of hosts from 0 to actor_hosts (${var.actor_hosts})."
  }
}

variable "actor_workers_per_host" {
  description = "Actor processes of a host; 0: one per vCPU."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.actor_workers_per_host >= 0 && var.actor_workers_per_host <= 1024 && floor(var.actor_workers_per_host) == var.actor_workers_per_host
    error_message = "actor_workers_per_host has to be a whole number of processes from 0 to 1024; 0: one per vCPU."
  }

  validation {
    condition     = var.actor_workers_per_host <= 0 || var.actor_workers_per_host >= local.shards
    error_message = "actor_workers_per_host ${var.actor_workers_per_host} is less than the ${local.shards} replay servers, so that some may have no actors: give at least as many, or 0 for one per vCPU."
  }
}

variable "environments_per_worker" {
  description = "Environments of one actor process; null: what the preset says."
  type        = number
  default     = null

  validation {
    condition     = var.environments_per_worker == null ? true : var.environments_per_worker >= 1 && var.environments_per_worker <= 4096 && floor(var.environments_per_worker) == var.environments_per_worker
    error_message = "environments_per_worker has to be a whole number of environments from 1 to 4096; leave it out for the preset's."
  }
}

variable "replay_volume_gib" {
  description = "GiB of the volume with the journal of experience, which outlives the replay host. It can grow, not shrink."
  type        = number
  default     = 100
  nullable    = false

  validation {
    condition     = var.replay_volume_gib >= 8 && var.replay_volume_gib <= 16384 && floor(var.replay_volume_gib) == var.replay_volume_gib
    error_message = "replay_volume_gib has to be a whole number of GiB from 8 to 16384."
  }
}

variable "learner_volume_gib" {
  description = "GiB of the disk of each learner host: system with CUDA, checkpoints and event files before they are in the bucket."
  type        = number
  default     = 200
  nullable    = false

  validation {
    condition     = var.learner_volume_gib >= 8 && var.learner_volume_gib <= 16384 && floor(var.learner_volume_gib) == var.learner_volume_gib
    error_message = "learner_volume_gib has to be a whole number of GiB from 8 to 16384."
  }
}

variable "use_placement_group" {
  description = "Put replay and learners into one cluster placement group: 10 Gbit/s a connection instead of 5. false helps when EC2 has no capacity for both in one."
  type        = bool
  default     = true
  nullable    = false
}

# Network, money, logs.

variable "vpc_cidr" {
  description = "Private addresses of the cluster's own network, which is one subnet."
  type        = string
  default     = "10.79.0.0/20"
  nullable    = false

  validation {
    condition     = can(cidrhost(var.vpc_cidr, 0)) && can(regex("^(10\\.|192\\.168\\.|172\\.(1[6-9]|2[0-9]|3[01])\\.)[0-9.]+/(1[6-9]|2[0-6])$", var.vpc_cidr)) && try(cidrhost(var.vpc_cidr, 0) == split("/", var.vpc_cidr)[0], false)
    error_message = "vpc_cidr has to be a private IPv4 network of /16 to /26 given by its first address, such as 10.79.0.0/20."
  }
}

variable "operator_cidrs" {
  description = "IPv4 networks that may open TensorBoard on the learner's port 6006. Empty: only the port forwarding of output tensorboard_command."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.operator_cidrs : can(regex("^[0-9.]+/[0-9]+$", cidr)) && try(cidrhost(cidr, 0) == split("/", cidr)[0], false)])
    error_message = "operator_cidrs has to hold IPv4 networks, each given by its first address, such as [\"203.0.113.7/32\"] for one address; `curl https://checkip.amazonaws.com` tells yours."
  }

  validation {
    condition     = alltrue([for cidr in var.operator_cidrs : try(tonumber(split("/", cidr)[1]) >= 16, true)])
    error_message = "operator_cidrs must not be wider than /16: TensorBoard has no password. Give your address with /32; `curl https://checkip.amazonaws.com` tells it."
  }
}

variable "max_hours" {
  description = "Hours after which everything that costs by the hour is ended, counted from the first apply. A change counts anew. Hosts read it within a minute; none is replaced."
  type        = number
  default     = 24
  nullable    = false

  validation {
    condition     = var.max_hours >= 1 && var.max_hours <= 168 && floor(var.max_hours) == var.max_hours
    error_message = "max_hours has to be a whole number of hours from 1 to 168."
  }
}

variable "log_retention_days" {
  description = "Days that CloudWatch keeps the hosts' logs; `terraform destroy` deletes them."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365], var.log_retention_days)
    error_message = "log_retention_days has to be 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180 or 365: CloudWatch knows no others up to a year."
  }
}
