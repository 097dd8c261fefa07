output "results_bucket" {
  description = "Bucket of checkpoints and event files: the cluster's variable results_bucket."
  value       = aws_s3_bucket.this["results"].bucket
}

output "state_bucket" {
  description = "Bucket of the clusters' Terraform states."
  value       = aws_s3_bucket.this["state"].bucket
}

output "image_build_profile" {
  description = "Instance profile of the instances that build images; Packer's variable instance_profile, where the name is another."
  value       = aws_iam_instance_profile.image_build.name
}

output "cluster_backend" {
  description = "terraform -chdir=deploy/terraform/bootstrap output -raw cluster_backend > deploy/terraform/cluster/backend.hcl"
  value       = <<-EOT
    bucket = "${aws_s3_bucket.this["state"].bucket}"
    region = "${var.region}"
  EOT
}

output "cluster_tfvars" {
  description = "terraform -chdir=deploy/terraform/bootstrap output -raw cluster_tfvars > deploy/terraform/cluster/bootstrap.auto.tfvars"
  value       = <<-EOT
    region         = "${var.region}"
    results_bucket = "${aws_s3_bucket.this["results"].bucket}"
  EOT
}

output "alarm" {
  description = "To whom the alarm about money writes."
  value       = local.has_budgets ? join(", ", var.budget_emails) : "nobody: AWS has no budgets in ${data.aws_partition.current.partition}; make one in the account that pays"
}
