# 64 actor processes: two hosts of 32 vCPUs, one process a vCPU. The first plan after smoke: `python -m deploy cost
# 64-actors --updates-per-second N` tells how many hosts a learner of N updates a second can use.
name        = "apexrl-64"
actor_hosts = 2
