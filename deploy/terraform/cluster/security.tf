# Who may talk to whom: every flow between roles is one line here, and becomes a rule out of one group and into another.
# There is no SSH; shells and TensorBoard come through Session Manager (see outputs.tf).

locals {
  # The ports of shards take turns. So each has rules of its own: actors have no business on the learner's ports.
  shard_flows = [for shard in range(local.shards) : {
    "experience-${shard}" = { from = "actor", to = "replay", port = 51001 + 2 * shard, what = "Unrolls from actors" }
    "batches-${shard}"    = { from = "learner", to = "replay", port = 51002 + 2 * shard, what = "The log and batches to the learner" }
  }]
  # The first host is where they meet; then each opens ports that its system chooses (Linux's range), for gloo and NCCL.
  team_flows = { for name, flow in {
    gradients = { from = "learner", to = "learner", port = 32768, last_port = 60999, what = "Learners of several hosts among themselves" }
  } : name => flow if var.learner_hosts > 1 }
  flows = merge({
    parameters           = { from = "actor", to = "learner", port = 52001, what = "Parameters to actors" }
    evaluator-parameters = { from = "replay", to = "learner", port = 52001, what = "Parameters to the evaluator" }
    metrics              = { from = "actor", to = "learner", port = 52002, what = "Figures from actors" }
    replay-metrics       = { from = "replay", to = "learner", port = 52002, what = "Figures from replay and evaluator" }
  }, local.team_flows, local.shard_flows...)
}

resource "aws_security_group" "role" {
  for_each = { replay = "The replay host", learner = "The learner", actor = "Actor hosts" }

  name        = "${var.name}-${each.key}"
  description = each.value
  vpc_id      = local.vpc_id

  tags = { Name = "${var.name}-${each.key}", Role = each.key }
}

resource "aws_vpc_security_group_ingress_rule" "flow" {
  for_each = local.flows

  security_group_id            = aws_security_group.role[each.value.to].id
  referenced_security_group_id = aws_security_group.role[each.value.from].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = try(each.value.last_port, each.value.port)
  description                  = each.value.what

  tags = { Name = "${var.name}-${each.key}" }
}

resource "aws_vpc_security_group_egress_rule" "flow" {
  for_each = local.flows

  security_group_id            = aws_security_group.role[each.value.from].id
  referenced_security_group_id = aws_security_group.role[each.value.to].id
  ip_protocol                  = "tcp"
  from_port                    = each.value.port
  to_port                      = try(each.value.last_port, each.value.port)
  description                  = each.value.what

  tags = { Name = "${var.name}-${each.key}" }
}

resource "aws_vpc_security_group_ingress_rule" "tensorboard" {
  for_each = toset(var.operator_cidrs)

  security_group_id = aws_security_group.role["learner"].id
  cidr_ipv4         = each.key
  ip_protocol       = "tcp"
  from_port         = 6006
  to_port           = 6006
  description       = "TensorBoard to operators"

  tags = { Name = "${var.name}-tensorboard" }
}

# Session Manager, S3, SSM and CloudWatch have no fixed addresses. DNS, time and metadata of AWS pass without a rule.
resource "aws_vpc_security_group_egress_rule" "aws" {
  for_each = aws_security_group.role

  security_group_id = each.value.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  description       = "AWS interfaces"

  tags = { Name = "${var.name}-${each.key}-aws" }
}

resource "aws_vpc_security_group_egress_rule" "proxy" {
  for_each = { for role, group in aws_security_group.role : role => group if !contains([0, 443], local.proxy_port) }

  security_group_id = each.value.id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "tcp"
  from_port         = local.proxy_port
  to_port           = local.proxy_port
  description       = "The proxy"

  tags = { Name = "${var.name}-${each.key}-proxy" }
}
