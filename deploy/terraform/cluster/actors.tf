# Actor hosts come and go: a host that spot takes back is replaced from whichever type has capacity. None of them has a
# number: actors lease their place on the ladder of epsilons from the replay server.

resource "aws_launch_template" "actor" {
  #checkov:skip=CKV_AWS_88:A public address is the cheapest way out to SSM and CloudWatch; no group lets anything in to it.
  name                                 = "${var.name}-actor"
  description                          = "Actor hosts of the cluster ${var.name}"
  image_id                             = local.image_id.cpu
  instance_initiated_shutdown_behavior = "terminate"
  update_default_version               = true
  user_data                            = base64encode(local.user_data.actor)
  ebs_optimized                        = true

  iam_instance_profile {
    arn = aws_iam_instance_profile.host["actor"].arn
  }

  network_interfaces {
    associate_public_ip_address = local.gives_public_ip
    delete_on_termination       = true
    security_groups             = [aws_security_group.role["actor"].id]
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = local.image_disk.cpu

    ebs {
      volume_type           = "gp3"
      volume_size           = local.image_gib.cpu
      encrypted             = true
      kms_key_id            = var.kms_key_id
      delete_on_termination = true
    }
  }

  # The provider's default tags do not reach what the group launches.
  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = "${var.name}-actor", Role = "actor" })
    }
  }

  tags = { Role = "actor" }
}

# The log of a run holds the stream of the first actor that greets its server. So actor hosts end before the replay
# host of another run starts, and new ones start after it: those of the run before could play something else.
resource "terraform_data" "run" {
  input = var.run
}

resource "aws_autoscaling_group" "actor" {
  name                      = local.actor_group
  min_size                  = 0
  max_size                  = var.actor_hosts
  desired_capacity          = var.actor_hosts
  vpc_zone_identifier       = [local.subnet_id]
  health_check_type         = "EC2"
  capacity_rebalance        = true # a replacement is started at the warning, before spot takes the host
  wait_for_capacity_timeout = "0"  # spot may take its time; the cluster works with the hosts that are there
  force_delete              = true # `terraform destroy` need not wait for hosts to drain: they hold nothing

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = var.actor_on_demand_hosts
      on_demand_percentage_above_base_capacity = 0
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.actor.id
        version            = aws_launch_template.actor.latest_version
      }

      dynamic "override" {
        for_each = var.actor_instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  # New flags or a new image replace the hosts, half of them at a time.
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 50
      instance_warmup        = 60
      skip_matching          = true # hosts that the same update has just launched
    }
  }

  dynamic "tag" {
    for_each = merge(local.tags, { Name = "${var.name}-actor", Role = "actor" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    replace_triggered_by = [terraform_data.subnet.id, terraform_data.run] # the first as of the learner's
  }

  # After replay and learner: where EC2 has no GPU to give, no actor host costs anything.
  depends_on = [
    aws_instance.replay, aws_autoscaling_group.learner,
    aws_iam_role_policy.deadline, aws_iam_role_policy.keys, aws_iam_role_policy.logs, aws_iam_role_policy.session, aws_route_table_association.this,
    aws_vpc_security_group_egress_rule.aws, aws_vpc_security_group_egress_rule.proxy, aws_ec2_subnet_cidr_reservation.fixed,
  ]
}
