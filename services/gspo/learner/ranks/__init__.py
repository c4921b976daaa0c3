"""The processes of one learner: their launch, their process group, the sums over them."""
