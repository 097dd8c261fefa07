# `terraform test` here needs no AWS account: the provider is a mock.
mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }

  mock_data "aws_availability_zones" {
    defaults = { names = ["us-east-1a", "us-east-1b"] }
  }

  # us-east-1a lacks one of the learner's types.
  mock_data "aws_ec2_instance_type_offerings" {
    defaults = {
      instance_types = ["r6in.4xlarge", "g6.4xlarge", "c7i.8xlarge", "r6in.4xlarge", "g6.4xlarge", "g5.4xlarge", "c7i.8xlarge"]
      locations      = ["us-east-1a", "us-east-1a", "us-east-1a", "us-east-1b", "us-east-1b", "us-east-1b", "us-east-1b"]
    }
  }

  mock_data "aws_ec2_instance_type" {
    defaults = {
      default_vcpus                  = 32
      supported_architectures        = ["x86_64"]
      supported_placement_strategies = ["cluster", "partition", "spread"]
      gpus                           = [{ count = 1, manufacturer = "NVIDIA", memory_size = 22888, name = "L4" }]
    }
  }

  mock_data "aws_ami_ids" {
    defaults = { ids = ["ami-0123456789abcdef0"] }
  }

  mock_data "aws_ami" {
    defaults = {
      id               = "ami-0123456789abcdef0"
      architecture     = "x86_64"
      root_device_name = "/dev/sda1"
      tags             = { Project = "apexrl", Version = "1.0.0" }
      block_device_mappings = [
        { device_name = "/dev/sda1", ebs = { volume_size = "20" }, no_device = "", virtual_name = "" },
      ]
    }
  }

  mock_data "aws_s3_bucket" {
    defaults = { bucket_region = "us-east-1" }
  }

  mock_resource "aws_iam_instance_profile" {
    defaults = { arn = "arn:aws:iam::123456789012:instance-profile/host" }
  }

  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/host" }
  }
}

variables {
  results_bucket       = "results"
  actor_instance_types = ["c7i.8xlarge"]
}

run "defaults" {
  command = apply

  assert {
    condition     = aws_subnet.this[0].availability_zone == "us-east-1b"
    error_message = "The zone has to be the first that offers all instance types."
  }

  assert {
    condition     = output.actor_processes == 192
    error_message = "Six hosts of 32 vCPUs are 192 actors."
  }

  assert {
    condition     = output.tensorboard_url_command == null && length(aws_vpc_security_group_ingress_rule.tensorboard) == 0
    error_message = "Nobody reaches TensorBoard from outside before operator_cidrs says so."
  }

  assert {
    condition     = strcontains(base64decode(aws_launch_template.learner[0].user_data), "--replay-host 10.79.0.10 --learner-host 10.79.0.11")
    error_message = "The learner has to know where the replay is."
  }
}

run "two_roles_share_a_group" {
  command = plan

  assert {
    condition     = aws_placement_group.this[0].strategy == "cluster"
    error_message = "Replay and learner have to be close."
  }

  assert {
    condition     = aws_autoscaling_group.actor.max_size == var.actor_hosts
    error_message = "The group must not grow beyond actor_hosts."
  }
}

run "learners_of_several_hosts" {
  command = plan

  variables {
    learner_hosts          = 2
    learner_instance_types = ["g6.4xlarge"]
  }

  assert {
    condition     = [for group in aws_autoscaling_group.learner : "${group.name} ${group.max_size}"] == ["apexrl-learner 1", "apexrl-learner-1 1"]
    error_message = "Each learner host has a group of its own, of one host."
  }

  assert {
    condition = alltrue([
      for rank, template in aws_launch_template.learner : alltrue([for words in [
        "APEXRL_HOST_RANK=${rank}\n", "APEXRL_ADDRESS=10.79.0.${11 + rank}\n",
        "--learner-host 10.79.0.11 --num-learners 1 --learner-hosts 2",
      ] : strcontains(base64decode(template.user_data), words)])
    ])
    error_message = "Each host has to know its rank, its address, and where the first one is."
  }

  assert {
    condition     = alltrue([for group in aws_autoscaling_group.learner : group.placement_group == aws_placement_group.this[0].name])
    error_message = "Learner hosts have to be close."
  }
}

run "gpus_of_several_kinds_that_learn_together" {
  command = plan

  variables {
    learner_hosts = 2
  }

  expect_failures = [check.gpus]
}

run "more_learner_hosts_than_replay_servers" {
  command = plan

  variables {
    learner_gpus  = 4
    learner_hosts = 8
  }

  expect_failures = [var.learner_hosts]
}
