# One role with one profile for each kind of host, and not more than it needs.
#
# The managed policy AmazonSSMManagedInstanceCore is not attached on purpose: it allows ssm:GetParameter on everything,
# so that an actor host could read the keys of the learner. `session` is the part of it that Session Manager needs.

locals {
  key_arn      = "arn:${local.partition}:ssm:${var.region}:${local.account}:parameter${local.key_path}"
  deadline_arn = "arn:${local.partition}:ssm:${var.region}:${local.account}:parameter${local.deadline_name}"
  log_arn      = "arn:${local.partition}:logs:${var.region}:${local.account}:log-group:${local.log_group}"
  store_arn    = "arn:${local.partition}:s3:::${var.results_bucket}"

  # The evaluator runs on the replay host and is an actor to the learner.
  secrets = { replay = ["replay", "actor"], learner = ["learner"], actor = ["actor"] }

  session_statements = [{
    Sid    = "SessionManager"
    Effect = "Allow"
    Action = [
      "ssm:UpdateInstanceInformation",
      "ssmmessages:CreateControlChannel",
      "ssmmessages:CreateDataChannel",
      "ssmmessages:OpenControlChannel",
      "ssmmessages:OpenDataChannel",
    ]
    Resource = "*" # as in AWS's own policy: channels have no names before they are opened
  }]
  log_statements = [{
    Sid      = "Logs"
    Effect   = "Allow"
    Action   = ["logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
    Resource = [local.log_arn, "${local.log_arn}:log-stream:*"]
  }]
  # By name, never by path: GetParametersByPath on the path would give all secrets below it.
  key_statements = {
    for role, owned in local.secrets : role => [{
      Sid    = "Keys"
      Effect = "Allow"
      Action = ["ssm:GetParameter", "ssm:GetParameters"]
      Resource = concat(
        [for name in ["replay", "learner", "actor"] : "${local.key_arn}/${name}.public"],
        [for name in owned : "${local.key_arn}/${name}.secret"],
      )
    }]
  }
  deadline_statements = [{
    Sid      = "Deadline"
    Effect   = "Allow"
    Action   = ["ssm:GetParameter"]
    Resource = [local.deadline_arn]
  }]
  # A new learner host takes the address of its rank, also from one that hangs.
  address_statements = [{
    Sid      = "Address"
    Effect   = "Allow"
    Action   = ["ec2:AssignPrivateIpAddresses"]
    Resource = ["arn:${local.partition}:ec2:${var.region}:${local.account}:network-interface/*"]
    Condition = { StringEquals = {
      "aws:ResourceTag/Project" = local.project
      "aws:ResourceTag/Cluster" = var.name
      "aws:ResourceTag/Role"    = "learner"
    } }
  }]
  # A learner at the end of its run ends the cluster. The schedules of guard.tf end it anyway when its time is over.
  finish_statements = [
    {
      Sid      = "SetDeadline"
      Effect   = "Allow"
      Action   = ["ssm:PutParameter"]
      Resource = [local.deadline_arn]
    },
    {
      Sid    = "EndGroups"
      Effect = "Allow"
      Action = ["autoscaling:SetDesiredCapacity"]
      Resource = [
        for group in local.groups :
        "arn:${local.partition}:autoscaling:${var.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/${group}"
      ]
    },
  ]
  result_statements = [
    {
      Sid      = "Results"
      Effect   = "Allow"
      Action   = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
      Resource = ["${local.store_arn}/${local.bucket_prefix}*"]
    },
    {
      Sid       = "ListResults"
      Effect    = "Allow"
      Action    = ["s3:ListBucket"]
      Resource  = [local.store_arn]
      Condition = { StringLike = { "s3:prefix" = ["${local.bucket_prefix}*"] } }
    },
  ]
}

resource "aws_iam_role" "host" {
  for_each = local.secrets

  permissions_boundary = var.permissions_boundary
  name                 = "${var.name}-${var.region}-${each.key}"
  description          = "Hosts of the role ${each.key} in the cluster ${var.name}"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })

  tags = { Role = each.key }
}

resource "aws_iam_role_policy" "session" {
  #checkov:skip=CKV_AWS_290:Channels of Session Manager have no names before they are opened; AWS's own policy says * as well.
  #checkov:skip=CKV_AWS_355:Channels of Session Manager have no names before they are opened; AWS's own policy says * as well.
  for_each = local.secrets

  name   = "session"
  role   = aws_iam_role.host[each.key].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.session_statements })
}

resource "aws_iam_role_policy" "logs" {
  for_each = local.secrets

  name   = "logs"
  role   = aws_iam_role.host[each.key].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.log_statements })
}

# The keys are SecureStrings under the account's own key for SSM, which lets whoever may read the parameter decrypt it.
resource "aws_iam_role_policy" "keys" {
  for_each = local.secrets

  name   = "keys"
  role   = aws_iam_role.host[each.key].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.key_statements[each.key] })
}

resource "aws_iam_role_policy" "deadline" {
  for_each = local.secrets

  name   = "deadline"
  role   = aws_iam_role.host[each.key].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.deadline_statements })
}

resource "aws_iam_role_policy" "address" {
  name   = "address"
  role   = aws_iam_role.host["learner"].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.address_statements })
}

resource "aws_iam_role_policy" "finish" {
  name   = "finish"
  role   = aws_iam_role.host["learner"].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.finish_statements })
}

resource "aws_iam_role_policy" "results" {
  name   = "results"
  role   = aws_iam_role.host["learner"].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.result_statements })
}

resource "aws_iam_instance_profile" "host" {
  for_each = local.secrets

  name = aws_iam_role.host[each.key].name
  role = aws_iam_role.host[each.key].name

  tags = { Role = each.key }
}
