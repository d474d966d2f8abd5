"""What users say about answers: as a reward of turns, as demonstrations and as a teacher."""
