"""The rendezvous: nodes become a job, and stay one."""
