variable "region" {
  description = "AWS region of the buckets; clusters run in the same one."
  type        = string
  default     = "us-east-1"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region has to be the name of an AWS region, such as us-east-1: `aws ec2 describe-regions` lists them."
  }
}

variable "name" {
  description = "Beginning of the buckets' names; the account's number and the region follow, which makes them unique."
  type        = string
  default     = "apexrl"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", var.name))
    error_message = "name has to be 3 to 20 small letters, digits and dashes, beginning with a letter: it becomes part of bucket names."
  }
}

variable "budget_emails" {
  description = "Addresses that hear when the account's month costs half, four fifths and all of the budget."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.budget_emails) >= 1 && length(var.budget_emails) <= 10
    error_message = "budget_emails has to name 1 to 10 addresses for the alarm about money: -var 'budget_emails=[\"you@example.com\"]'."
  }

  validation {
    condition     = alltrue([for email in var.budget_emails : can(regex("^[^@\\s]+@[^@\\s]+\\.[^@\\s]+$", email))])
    error_message = "budget_emails has to hold mail addresses, such as [\"you@example.com\"]."
  }
}

variable "budget_usd_per_month" {
  description = "Dollars a month of the whole account (not only of clusters) that the alarm measures against. It stops nothing: max_hours of a cluster does."
  type        = number
  default     = 100
  nullable    = false

  validation {
    condition     = var.budget_usd_per_month >= 1 && var.budget_usd_per_month <= 1000000
    error_message = "budget_usd_per_month has to be a number of dollars from 1 to 1000000."
  }
}

variable "permissions_boundary" {
  description = "ARN of the policy that bounds each IAM role, where an organization lets nobody make roles without one; null: none."
  type        = string
  default     = null

  validation {
    condition     = var.permissions_boundary == null || can(regex("^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/.+$", var.permissions_boundary))
    error_message = "permissions_boundary has to be the ARN of an IAM policy, such as arn:aws:iam::123456789012:policy/boundary."
  }
}
