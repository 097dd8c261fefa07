# `terraform test` here needs no AWS account: the provider is a mock.
mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

variables {
  budget_emails = ["you@example.com"]
}

run "names" {
  command = plan

  assert {
    condition     = output.results_bucket == "apexrl-results-123456789012-us-east-1"
    error_message = "The results bucket is named otherwise."
  }

  assert {
    condition     = strcontains(output.cluster_backend, "bucket = \"apexrl-state-123456789012-us-east-1\"")
    error_message = "The backend's file names another bucket."
  }

  assert {
    condition     = toset([for notification in aws_budgets_budget.month[0].notification : notification.threshold]) == toset([50, 80, 100])
    error_message = "The alarms are at other thresholds."
  }
}

run "too_long_for_a_bucket" {
  command = plan

  variables {
    name = "a-name-that-is-much-too-long-for-a-bucket"
  }

  expect_failures = [var.name]
}
