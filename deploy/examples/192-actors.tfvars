# 192 actor processes: six hosts of 32 vCPUs, one process a vCPU.
name        = "apexrl-192"
actor_hosts = 6
