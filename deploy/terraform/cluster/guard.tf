# The time limit. Three things end the spending, so that no single one has to work:
# hosts power themselves off (which terminates them), the group of actor hosts is scaled to zero by AWS, and ten minutes
# later AWS terminates replay and learner if they are still there, for example because their system hangs.
# A finished learner ends the spending, too: it scales the group to zero and sets the hosts' deadline to now.

resource "terraform_data" "deadline" {
  # The time of the first apply counts: ignoring later values keeps plans without drift.
  input            = timeadd(plantimestamp(), "${var.max_hours}h")
  triggers_replace = var.max_hours

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = timecmp(self.output, plantimestamp()) > 0
      error_message = "The time limit of max_hours passed at ${self.output}. `terraform -chdir=deploy/terraform/cluster destroy` ends the cluster; `terraform -chdir=deploy/terraform/cluster apply -replace=terraform_data.deadline` starts it again, and the learner goes on with its checkpoint."
    }
  }
}

# The hosts read it every minute: another time limit replaces no host.
resource "aws_ssm_parameter" "deadline" {
  #checkov:skip=CKV2_AWS_34:The value is a time, which everybody may know; hosts would need the right to decrypt it.
  name        = local.deadline_name
  description = "When the hosts of the cluster ${var.name} power themselves off"
  type        = "String"
  value       = terraform_data.deadline.output
}

resource "aws_autoscaling_schedule" "limit" {
  scheduled_action_name  = "${var.name}-limit"
  autoscaling_group_name = aws_autoscaling_group.actor.name
  start_time             = terraform_data.deadline.output
  min_size               = 0
  max_size               = 0
  desired_capacity       = 0
}

locals {
  fixed_hosts = merge({ replay = aws_instance.replay.id }, {
    for rank, host in local.learner_hosts : host.name => aws_instance.learner[rank].id
  })

  terminate_at  = "at(${trimsuffix(timeadd(terraform_data.deadline.output, "10m"), "Z")})"
  terminate_arn = "arn:${local.partition}:scheduler:::aws-sdk:ec2:terminateInstances"
}

# A resource each, not one for all: a host that cannot be started must not keep the others from their limit. And a
# request for all would do nothing when one of them is long gone.
resource "aws_scheduler_schedule" "replay_limit" {
  #checkov:skip=CKV_AWS_297:The schedule holds an instance id and a time; there is nothing to hide with a key of one's own.
  name                         = "${var.name}-limit-replay"
  description                  = "Terminates the replay host of the cluster ${var.name} when its time is over"
  schedule_expression          = local.terminate_at
  schedule_expression_timezone = "UTC"
  action_after_completion      = "NONE"

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = local.terminate_arn
    role_arn = aws_iam_role.limit.arn
    input    = jsonencode({ InstanceIds = [aws_instance.replay.id] })

    retry_policy {
      maximum_event_age_in_seconds = 3600
      maximum_retry_attempts       = 20
    }
  }
}

resource "aws_scheduler_schedule" "learner_limit" {
  #checkov:skip=CKV_AWS_297:The schedule holds an instance id and a time; there is nothing to hide with a key of one's own.
  count = var.learner_hosts

  name                         = "${var.name}-limit-${local.learner_hosts[count.index].name}"
  description                  = "Terminates a learner host of the cluster ${var.name} when its time is over"
  schedule_expression          = local.terminate_at
  schedule_expression_timezone = "UTC"
  action_after_completion      = "NONE"

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = local.terminate_arn
    role_arn = aws_iam_role.limit.arn
    input    = jsonencode({ InstanceIds = [aws_instance.learner[count.index].id] })

    retry_policy {
      maximum_event_age_in_seconds = 3600
      maximum_retry_attempts       = 20
    }
  }
}

resource "aws_iam_role" "limit" {
  name        = "${var.name}-${var.region}-limit"
  description = "Lets the scheduler end the cluster ${var.name}"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "scheduler.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_iam_role_policy" "limit" {
  name = "terminate"
  role = aws_iam_role.limit.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid      = "TerminateHostsOfThisCluster"
      Effect   = "Allow"
      Action   = "ec2:TerminateInstances"
      Resource = "arn:${local.partition}:ec2:${var.region}:${local.account}:instance/*"
      Condition = { StringEquals = {
        "aws:ResourceTag/Project" = local.project
        "aws:ResourceTag/Cluster" = var.name
      } }
    }]
  })
}

# A host whose kernel hangs is started again; its units start by themselves, and its files are still there.
resource "aws_cloudwatch_metric_alarm" "hangs" {
  for_each = local.fixed_hosts

  alarm_name          = "${var.name}-${each.key}-hangs"
  alarm_description   = "Reboots the ${each.key} host of the cluster ${var.name} after three minutes without a sign of life"
  namespace           = "AWS/EC2"
  metric_name         = "StatusCheckFailed_Instance"
  dimensions          = { InstanceId = each.value }
  statistic           = "Maximum"
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  period              = 60
  evaluation_periods  = 3
  alarm_actions       = ["arn:${local.partition}:automate:${var.region}:ec2:reboot"]
}
