"""Value learning for teams: episodes of joint actions, VDN and QMIX."""
