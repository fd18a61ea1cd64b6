"""Records of members, kept outside the cluster: in etcd, or in Kubernetes."""
