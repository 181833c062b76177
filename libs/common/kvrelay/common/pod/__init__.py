"""What every kind of pod has beside its work: where it is in its life, its HTTP side, who may call."""
