from .atomic import (
    FileLock as FileLock,
    lock_output as lock_output,
    replacing as replacing,
    sync as sync,
    write_atomic as write_atomic,
)
from .cluster import (
    ray_cluster as ray_cluster,
)
from .hub import (
    from_hub as from_hub,
)
from .open_clip import (
    prompt_list as prompt_list,
)
from .pages import (
    check_page as check_page,
    templates as templates,
    write_page as write_page,
)
from .patterns import (
    name_order as name_order,
    output_folder as output_folder,
    user_path as user_path,
)
from .processes import (
    end_with_parent as end_with_parent,
)
from .splitmix import (
    MASK as MASK,
    STEP as STEP,
    mix as mix,
    mix_array as mix_array,
)
from .terminal import (
    CountProgress as CountProgress,
    counted as counted,
    printable as printable,
    shown as shown,
    size_of as size_of,
    without_secrets as without_secrets,
)
