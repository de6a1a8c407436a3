"""Networks: modules only, no policy about how they are trained."""
