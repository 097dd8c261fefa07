# Four GPUs of one host learn together, each from a replay server of its own: for networks whose update is slow on one
# GPU. docs/learners.md says when that pays.
name                   = "apexrl-4-gpus"
learner_instance_types = ["g6.12xlarge", "g5.12xlarge"]
learner_gpus           = 4
actor_hosts            = 12
