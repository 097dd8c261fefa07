# 360 actor processes, as many as in the paper: twelve hosts of 32 vCPUs with 30 processes each, two vCPUs left for
# relays and sending. The learner has a GPU with 48 GB.
name                   = "apexrl-360"
actor_hosts            = 12
actor_workers_per_host = 30
learner_instance_types = ["g6e.4xlarge", "g6e.8xlarge"]
