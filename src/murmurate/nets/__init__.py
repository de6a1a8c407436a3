"""Networks: modules only, without any choice of how they are trained."""
