from tests.runners.conftest import bench as bench
from tests.runners.conftest import impatient as impatient
from tests.runners.conftest import model as model
from tests.runners.conftest import store as store
