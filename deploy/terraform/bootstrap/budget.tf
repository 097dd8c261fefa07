# An alarm, not a brake: costs arrive here hours late. The account's whole month is measured, because a budget by tag
# sees nothing before somebody activates the tag for cost allocation by hand.
resource "aws_budgets_budget" "month" {
  count = local.has_budgets ? 1 : 0

  name         = "${var.name}-${var.region}-month" # budgets are the account's, and bootstrap is a region's
  budget_type  = "COST"
  limit_amount = tostring(var.budget_usd_per_month)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  dynamic "notification" {
    for_each = { half = [50, "ACTUAL"], most = [80, "ACTUAL"], all = [100, "ACTUAL"], forecast = [100, "FORECASTED"] }

    content {
      comparison_operator        = "GREATER_THAN"
      threshold                  = notification.value[0]
      threshold_type             = "PERCENTAGE"
      notification_type          = notification.value[1]
      subscriber_email_addresses = var.budget_emails
    }
  }
}

locals {
  # GovCloud is paid through an account of the partition aws, which alone can be alarmed.
  has_budgets = data.aws_partition.current.partition != "aws-us-gov"
}
