# A learner host is its rank: the first one writes the run. Each is a group of one, which takes whichever of the types
# has capacity, and replaces a host that is lost or hangs. A group gives its host any address. So the host takes that of
# its rank itself (apexrl-address.service), and is the same one to all others.

resource "aws_launch_template" "learner" {
  #checkov:skip=CKV_AWS_88:A public address is the cheapest way out to SSM, S3 and CloudWatch; only operator_cidrs get in, and only to TensorBoard.
  count = var.learner_hosts

  name                                 = local.learner_hosts[count.index].group
  description                          = "The learner host of rank ${count.index} in the cluster ${var.name}"
  image_id                             = local.image_id.gpu
  instance_initiated_shutdown_behavior = "terminate"
  update_default_version               = true
  user_data                            = base64encode(local.user_data[local.learner_hosts[count.index].name])
  ebs_optimized                        = true

  iam_instance_profile {
    arn = aws_iam_instance_profile.host["learner"].arn
  }

  network_interfaces {
    associate_public_ip_address = local.gives_public_ip
    delete_on_termination       = true
    security_groups             = [aws_security_group.role["learner"].id]
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = local.image_disk.gpu

    ebs {
      volume_type           = "gp3"
      volume_size           = var.learner_volume_gib
      encrypted             = true
      kms_key_id            = var.kms_key_id
      delete_on_termination = true
    }
  }

  # By the tags of its network interface a host may take the address of its rank (iam.tf).
  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = merge(local.tags, { Name = local.learner_hosts[count.index].group, Role = "learner" })
    }
  }

  tags = { Role = "learner" }
}

resource "aws_autoscaling_group" "learner" {
  count = var.learner_hosts

  name                      = local.learner_hosts[count.index].group
  min_size                  = 0
  max_size                  = 1
  desired_capacity          = 1
  vpc_zone_identifier       = [local.subnet_id]
  placement_group           = var.use_placement_group ? aws_placement_group.this.name : null
  health_check_type         = "EC2"
  wait_for_capacity_timeout = "15m" # without capacity `apply` fails with AWS's reason, and makes no actor host

  mixed_instances_policy {
    instances_distribution {
      on_demand_percentage_above_base_capacity = 100
      on_demand_allocation_strategy            = "prioritized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.learner[count.index].id
        version            = aws_launch_template.learner[count.index].latest_version
      }

      dynamic "override" {
        for_each = var.learner_instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  # New flags or a new image replace the host: it ends, with its last upload, before the next one starts.
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 0
      skip_matching          = true # a host that the same update has just launched
    }
  }

  dynamic "tag" {
    for_each = merge(local.tags, { Name = local.learner_hosts[count.index].group, Role = "learner" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    replace_triggered_by = [terraform_data.subnet.id] # its host would keep the subnet of another zone from its end
  }

  timeouts {
    delete = "20m" # `terraform destroy` waits for the last upload
  }

  # Destroyed before these: its last upload still needs its rights and its way to S3.
  depends_on = [
    aws_iam_role_policy.address, aws_iam_role_policy.deadline, aws_iam_role_policy.finish, aws_iam_role_policy.keys,
    aws_iam_role_policy.logs, aws_iam_role_policy.results, aws_iam_role_policy.session,
    aws_route_table_association.this, aws_vpc_endpoint.s3, aws_vpc_security_group_egress_rule.aws,
    aws_vpc_security_group_egress_rule.proxy, aws_ec2_subnet_cidr_reservation.fixed,
  ]
}
