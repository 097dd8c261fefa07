# The time limit. Three things end the spending, so that no single one has to work:
# hosts power themselves off (which terminates them), the groups of actor and learner hosts are scaled to zero by AWS, and
# ten minutes later AWS terminates the replay host if it is still there, for example because its system hangs.
# A learner host that powers itself off first scales its group to zero, which would replace it for ever.
# A finished learner ends the spending, too: it scales the groups to zero and sets the hosts' deadline to now.

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

# AWS forgets the schedules of a group that is replaced.
resource "aws_autoscaling_schedule" "limit" {
  scheduled_action_name  = "${var.name}-limit"
  autoscaling_group_name = aws_autoscaling_group.actor.name
  start_time             = terraform_data.deadline.output
  min_size               = 0
  max_size               = 0
  desired_capacity       = 0

  lifecycle {
    replace_triggered_by = [aws_autoscaling_group.actor.id]
  }
}

# It also ends a learner host that hangs.
resource "aws_autoscaling_schedule" "learner_limit" {
  count = var.learner_hosts

  scheduled_action_name  = "${local.learner_hosts[count.index].group}-limit"
  autoscaling_group_name = aws_autoscaling_group.learner[count.index].name
  start_time             = terraform_data.deadline.output
  min_size               = 0
  max_size               = 0
  desired_capacity       = 0

  lifecycle {
    replace_triggered_by = [aws_autoscaling_group.learner[count.index].id]
  }
}

resource "aws_scheduler_schedule" "replay_limit" {
  #checkov:skip=CKV_AWS_297:The schedule holds an instance id and a time; there is nothing to hide with a key of one's own.
  name                         = "${var.name}-limit-replay"
  description                  = "Terminates the replay host of the cluster ${var.name} when its time is over"
  schedule_expression          = "at(${trimsuffix(timeadd(terraform_data.deadline.output, "10m"), "Z")})"
  schedule_expression_timezone = "UTC"
  action_after_completion      = "NONE"

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = "arn:${local.partition}:scheduler:::aws-sdk:ec2:terminateInstances"
    role_arn = aws_iam_role.limit.arn
    input    = jsonencode({ InstanceIds = [aws_instance.replay.id] })

    retry_policy {
      maximum_event_age_in_seconds = 3600
      maximum_retry_attempts       = 20
    }
  }
}

resource "aws_iam_role" "limit" {
  permissions_boundary = var.permissions_boundary
  name                 = "${var.name}-${var.region}-limit"
  description          = "Lets the scheduler end the cluster ${var.name}"
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

# A replay host whose kernel hangs is started again; its units start by themselves, and its files are still there.
resource "aws_cloudwatch_metric_alarm" "hangs" {
  alarm_name          = "${var.name}-replay-hangs"
  alarm_description   = "Reboots the replay host of the cluster ${var.name} after three minutes without a sign of life"
  namespace           = "AWS/EC2"
  metric_name         = "StatusCheckFailed_Instance"
  dimensions          = { InstanceId = aws_instance.replay.id }
  statistic           = "Maximum"
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  period              = 60
  evaluation_periods  = 3
  alarm_actions       = ["arn:${local.partition}:automate:${var.region}:ec2:reboot"]
}
