# journald of every host, by the CloudWatch agent in the image: a stream for each role and instance.
resource "aws_cloudwatch_log_group" "this" {
  #checkov:skip=CKV_AWS_158:CloudWatch encrypts with its own key; a KMS key costs a dollar a month, and logs hold no secrets.
  #checkov:skip=CKV_AWS_338:Logs of a training run are of no use after a year; log_retention_days decides.
  name              = local.log_group
  retention_in_days = var.log_retention_days
}
