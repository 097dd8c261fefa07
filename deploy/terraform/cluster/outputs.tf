# A group makes its host anew when it has to. So commands ask for the one that runs now.
locals {
  learner_queries = { for host in local.learner_hosts : host.name => join(" ", [
    "aws ec2 describe-instances --region ${var.region} --output text --filters Name=tag:Name,Values=${host.group}",
    "Name=instance-state-name,Values=running --query",
  ]) }
  learner_ids = {
    for name, query in local.learner_queries : name => "\"$(${query} 'Reservations[].Instances[].InstanceId')\""
  }
}

output "tensorboard_command" {
  description = "Run it, leave it running, and open http://127.0.0.1:6006 (needs the Session Manager plugin of the AWS CLI)."
  value       = "aws ssm start-session --region ${var.region} --target ${local.learner_ids.learner} --document-name AWS-StartPortForwardingSession --parameters portNumber=6006,localPortNumber=6006"
}

output "tensorboard_url_command" {
  description = "Prints the address of TensorBoard for operator_cidrs; null without any."
  value       = length(var.operator_cidrs) > 0 ? "${local.learner_queries.learner} \"Reservations[].Instances[].join('', ['http://', PublicIpAddress, ':6006'])\"" : null
}

output "shell_commands" {
  description = "A shell on a host, without SSH. For an actor host take an instance id from `actor_hosts_command`."
  value = {
    for name, id in merge({ replay = aws_instance.replay.id }, local.learner_ids) : name => "aws ssm start-session --region ${var.region} --target ${id}"
  }
}

output "actor_hosts_command" {
  description = "Lists the actor hosts that run now."
  value       = "aws autoscaling describe-auto-scaling-groups --region ${var.region} --auto-scaling-group-names ${aws_autoscaling_group.actor.name} --query 'AutoScalingGroups[0].Instances[].[InstanceId,InstanceType,LifecycleState]' --output table"
}

output "logs_command" {
  description = "Follows the logs of all hosts."
  value       = "aws logs tail ${aws_cloudwatch_log_group.this.name} --region ${var.region} --follow"
}

output "results" {
  description = "Where checkpoints and event files are, also after `terraform destroy`."
  value       = "s3://${var.results_bucket}/${local.bucket_prefix}${var.run}/"
}

output "deadline" {
  description = "When everything that costs by the hour is ended (UTC)."
  value       = terraform_data.deadline.output
}

output "image_version" {
  description = "Version of the images that the hosts run."
  value       = terraform_data.images.input.cpu.version
}

output "actor_processes" {
  description = "Actor processes when all hosts are of the first of actor_instance_types."
  value       = var.actor_hosts * local.workers_of[var.actor_instance_types[0]]
}
