# Zones, instance types and images: looked up, never written down.

data "aws_availability_zones" "standard" {
  #checkov:skip=CKV_AWS_394:A zone that AWS adds changes nothing: the one that was chosen is kept in terraform_data.zone.
  state = "available"

  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_ec2_instance_type_offerings" "zones" {
  location_type = "availability-zone"

  filter {
    name   = "instance-type"
    values = local.instance_types
  }

  lifecycle {
    postcondition {
      condition     = length(setsubtract(local.instance_types, self.instance_types)) == 0
      error_message = "No zone of ${var.region} offers ${join(", ", sort(setsubtract(local.instance_types, self.instance_types)))}: change replay_instance_type, learner_instance_types or actor_instance_types, or choose another region. `aws ec2 describe-instance-type-offerings --region ${var.region}` lists what there is."
    }
  }
}

data "aws_ec2_instance_type" "this" {
  for_each = toset(data.aws_ec2_instance_type_offerings.zones.instance_types) # all of ours, see above

  instance_type = each.key
}

locals {
  types_of_zone = {
    for zone in data.aws_availability_zones.standard.names : zone => toset([
      for index, location in data.aws_ec2_instance_type_offerings.zones.locations :
      data.aws_ec2_instance_type_offerings.zones.instance_types[index] if location == zone
    ])
  }
  types_missing_in_zone = { for zone, types in local.types_of_zone : zone => sort(setsubtract(local.instance_types, types)) }
  zones                 = sort([for zone, missing in local.types_missing_in_zone : zone if length(missing) == 0 && (local.makes_subnet || contains(keys(local.subnets_of_zones), zone))])
  zone                  = var.availability_zone != null ? var.availability_zone : try(local.zones[0], "none")
}

# aws_ami_ids, because it may find nothing: aws_ami would end with an error that does not say what to do.
data "aws_ami_ids" "role" {
  for_each = local.image_roles

  owners = ["self"]

  filter {
    name   = "tag:Project"
    values = [local.project]
  }

  filter {
    name   = "tag:Role"
    values = [each.key]
  }

  filter {
    name   = "tag:Version"
    values = [local.asked_version]
  }

  filter {
    name   = "state"
    values = ["available"]
  }

  lifecycle {
    postcondition {
      condition     = length(self.ids) > 0
      error_message = "There is no image with the tags Project=${local.project}, Role=${each.key}, Version=${local.asked_version} in ${var.region}. Build it with `packer build` in deploy/packer, or choose another image_version or region."
    }
  }
}

data "aws_ami" "role" {
  for_each = { for role, found in data.aws_ami_ids.role : role => found.ids[0] if length(found.ids) > 0 } # the newest

  owners = ["self"]

  filter {
    name   = "image-id"
    values = [each.value]
  }

  lifecycle {
    postcondition {
      condition     = contains(keys(self.tags), "Version")
      error_message = "Image ${self.id} has no tag Version: build it with `packer build` in deploy/packer."
    }
  }
}

# `try`, because `terraform destroy` evaluates this too, and has to work when the images are gone.
locals {
  asked_version = var.image_version == null || var.image_version == "latest" ? "*" : var.image_version
  newest_images = { for role in ["cpu", "gpu"] : role => {
    id           = try(data.aws_ami.role[role].id, data.aws_ssm_parameter.base_image[role].insecure_value, "none")
    version      = try(data.aws_ami.role[role].tags["Version"], coalesce(var.release, "none"))
    architecture = try(data.aws_ami.role[role].architecture, var.release == null ? "none" : "x86_64")
    disk         = try(data.aws_ami.role[role].root_device_name, local.base_disk)
    # GiB of the image's own disk, which a host's disk cannot be smaller than.
    gib = max(var.release == null ? 1 : local.base_gib[role], try([
      for device in data.aws_ami.role[role].block_device_mappings : tonumber(device.ebs["volume_size"])
      if device.device_name == data.aws_ami.role[role].root_device_name
    ], [])...)
  } }
}

# The images are chosen once: one that somebody builds for a test must not replace the hosts of a run at the next apply.
# Of this resource `input` is used, never `output`: that is unknown in the plan of each change, and an image that is
# unknown replaces its hosts.
resource "terraform_data" "images" {
  input            = local.newest_images
  triggers_replace = var.release != null ? var.release : var.image_version == "latest" ? join(" ", [for role, image in local.newest_images : image.id]) : var.image_version

  lifecycle {
    ignore_changes = [input]

    precondition {
      condition     = var.release == null || var.image_version == null
      error_message = "release and image_version exclude each other: hosts install a release, or start from images."
    }

    postcondition {
      condition     = self.input.cpu.version == self.input.gpu.version
      error_message = "The newest images are of different versions (cpu ${self.input.cpu.version}, gpu ${self.input.gpu.version}), and hosts must not mix them: build both at one version, or set image_version to one that both have."
    }

    postcondition {
      condition     = alltrue([for role, found in data.aws_ami_ids.role : contains(found.ids, self.input[role].id)])
      error_message = "The images of version ${self.input.cpu.version}, which the cluster was started with, are gone from ${var.region}: set image_version to one that is there, or to \"latest\"."
    }
  }
}

locals {
  image_id     = { for role, image in terraform_data.images.input : role => image.id }
  image_disk   = { for role, image in terraform_data.images.input : role => image.disk }
  image_gib    = { for role, image in terraform_data.images.input : role => image.gib }
  architecture = terraform_data.images.input.cpu.architecture

  facts_of = { for type in local.instance_types : type => {
    architectures = try(data.aws_ec2_instance_type.this[type].supported_architectures, [])
    strategies    = try(data.aws_ec2_instance_type.this[type].supported_placement_strategies, [])
    vcpus         = try(data.aws_ec2_instance_type.this[type].default_vcpus, 0)
    gpus          = try(sum([for gpu in data.aws_ec2_instance_type.this[type].gpus : gpu.count]), 0)
    gpu_makers    = try([for gpu in data.aws_ec2_instance_type.this[type].gpus : gpu.manufacturer], [])
  } }
  # What a replay server takes, made from the code (`python -m deploy flags`), and what one would get at most: each
  # process of a host is a server's, in turn.
  limits       = jsondecode(file("${path.module}/limits.json"))
  workers_of   = { for type in var.actor_instance_types : type => var.actor_workers_per_host > 0 ? var.actor_workers_per_host : local.facts_of[type].vcpus }
  shard_actors = var.actor_hosts * ceil(max(values(local.workers_of)...) / local.shards)
  environments = coalesce(var.environments_per_worker, try(local.limits.environments_per_worker[var.agent][var.preset], 1))

  # The types of learner hosts that do not fit, each for one reason.
  types_without_gpu     = [for type in var.learner_instance_types : type if !contains(local.facts_of[type].gpu_makers, "NVIDIA")]
  types_with_gpu        = [for type in var.learner_instance_types : type if !contains(local.types_without_gpu, type)]
  types_of_other_driver = [for type in local.types_with_gpu : type if !contains(local.learner_families, split(".", type)[0])]
  types_of_few_gpus     = [for type in local.types_with_gpu : "${type} (${local.facts_of[type].gpus})" if local.facts_of[type].gpus < var.learner_gpus]
  types_of_idle_gpus    = [for type in local.types_with_gpu : "${type} has ${local.facts_of[type].gpus}" if local.facts_of[type].gpus > var.learner_gpus]
  types_of_no_group = [
    for type in concat([var.replay_instance_type], var.learner_instance_types) : type
    if !contains(local.facts_of[type].strategies, "cluster")
  ]

  types_of_few_vcpus          = [for type in var.actor_instance_types : type if local.facts_of[type].vcpus < local.shards]
  types_of_other_architecture = sort([for type, facts in local.facts_of : type if !contains(facts.architectures, local.architecture)])
}

# The zone is chosen once: a type that is offered in one more zone later must not move the cluster, nor must a clone
# without the file that names the zone. As of the images, `input` is used and never `output`: a zone that is unknown
# would replace the journal's volume. Here is also asked what has to be true of everything that was looked up, before
# anything is started.
resource "terraform_data" "zone" {
  input = local.zone

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = coalesce(var.availability_zone, self.input) == self.input
      error_message = "The cluster is in ${self.input}, and availability_zone asks for ${coalesce(var.availability_zone, "none")}: leave it out to stay; or `terraform -chdir=deploy/terraform/cluster apply -replace=terraform_data.zone`, which makes all hosts anew there, without the experience."
    }

    precondition {
      condition     = var.availability_zone != null || length(local.zones) > 0
      error_message = "No zone of ${var.region} offers ${join(", ", sort(local.instance_types))} together${local.of_subnets} (missing: ${join("; ", [for zone, types in local.types_missing_in_zone : "${zone} ${join(" ", types)}"])}). Change replay_instance_type, learner_instance_types or actor_instance_types, or choose another region."
    }

    precondition {
      condition     = var.availability_zone == null || contains(local.zones, coalesce(var.availability_zone, "none"))
      error_message = "availability_zone ${coalesce(var.availability_zone, "none")} does not offer ${coalesce(join(", ", try(local.types_missing_in_zone[var.availability_zone], ["anything"])), "a subnet of subnet_ids")}; zones that offer all instance types: ${length(local.zones) > 0 ? join(", ", local.zones) : "none"}. Leave availability_zone out, or change the instance types."
    }

    precondition {
      condition     = length(local.types_of_other_architecture) == 0
      error_message = "The images are ${local.architecture}, which ${join(", ", local.types_of_other_architecture)} cannot run: change replay_instance_type, learner_instance_types or actor_instance_types (Graviton types have a g after the generation's number)."
    }

    precondition {
      condition     = length(local.types_without_gpu) == 0
      error_message = "learner_instance_types ${join(", ", local.types_without_gpu)} have no NVIDIA GPU: choose g or p types, such as g6.4xlarge."
    }

    precondition {
      condition     = length(local.types_of_other_driver) == 0
      error_message = "learner_instance_types ${join(", ", local.types_of_other_driver)} have no whole GPU that the image's driver drives: choose one of ${join(", ", local.learner_families)}, such as g6.4xlarge."
    }

    precondition {
      condition     = length(local.types_of_few_gpus) == 0
      error_message = "learner_gpus ${var.learner_gpus} is more than the GPUs of learner_instance_types ${join(", ", local.types_of_few_gpus)}: give fewer, or types with so many, such as g6.12xlarge (4) or g6.48xlarge (8)."
    }

    precondition {
      condition     = local.divides_batches
      error_message = "${var.agent}'s batch of ${local.batch_size} has no equal, whole parts for ${local.learners} learners (learner_gpus x learner_hosts)${length(local.batch_mix) > 0 ? " with the shares of its mix ${join(" ", local.batch_mix)}" : ""}: give learner_flags a batch_size that has, or fewer learners."
    }

    precondition {
      condition     = local.shards <= local.learners || !local.replays_by_walking
      error_message = "replay_shards ${local.shards} is more than the ${local.learners} learners, and an LSTM's replay_state walk follows one shard: leave replay_shards out, or give learner_flags another replay_state."
    }

    precondition {
      condition     = var.actor_workers_per_host > 0 || length(local.types_of_few_vcpus) == 0
      error_message = "actor_instance_types ${join(", ", local.types_of_few_vcpus)} have fewer vCPUs than there are replay servers (${local.shards}), so that some may have no actors: choose larger types, or give actor_workers_per_host."
    }

    precondition {
      condition     = local.shard_actors <= local.limits.actors
      error_message = "actor_hosts ${var.actor_hosts} of ${max(values(local.workers_of)...)} processes are ${local.shard_actors} actors for each replay server, which takes ${local.limits.actors}: give fewer hosts, fewer actor_workers_per_host, or more replay_shards."
    }

    precondition {
      condition     = local.shard_actors * local.environments <= local.limits.environments
      error_message = "environments_per_worker ${local.environments} of ${local.shard_actors} actors are ${local.shard_actors * local.environments} environments for each replay server, which takes ${local.limits.environments}: give fewer, fewer actor_hosts, or more replay_shards."
    }

    precondition {
      condition     = !var.use_placement_group || length(local.types_of_no_group) == 0
      error_message = "replay_instance_type or learner_instance_types ${join(", ", local.types_of_no_group)} cannot be in a cluster placement group: choose others, or set use_placement_group = false."
    }

    precondition {
      condition     = var.learner_volume_gib >= local.image_gib.gpu
      error_message = "learner_volume_gib ${var.learner_volume_gib} is less than the gpu image's ${local.image_gib.gpu} GiB: give at least that."
    }

    precondition {
      condition     = data.aws_s3_bucket.results.bucket_region == var.region
      error_message = "results_bucket ${data.aws_s3_bucket.results.bucket} is in ${data.aws_s3_bucket.results.bucket_region}, the cluster in ${var.region}: use the region of deploy/terraform/bootstrap, or apply that in ${var.region}."
    }
  }
}

check "gpus" {
  assert {
    condition     = length(local.types_of_idle_gpus) == 0
    error_message = "learner_instance_types ${join(", ", local.types_of_idle_gpus)}: all GPUs cost, and learner_gpus is ${var.learner_gpus}: raise it, or choose smaller types."
  }

  assert {
    condition     = var.learner_hosts == 1 || length(distinct([for type in var.learner_instance_types : split(".", type)[0]])) == 1
    error_message = "learner_instance_types ${join(", ", var.learner_instance_types)} have GPUs of several kinds, and learner_hosts is ${var.learner_hosts}: nobody has seen different GPUs compute the same network, and learners whose networks differ end the run. Give types of one family."
  }
}

data "aws_s3_bucket" "results" {
  bucket = var.results_bucket
}
